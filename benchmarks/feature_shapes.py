"""Shapes with windows, chunks, softcap, sinks and packed documents, for benchmarks/features.py."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from functools import cached_property

from flash3.flops import seen_pairs


def document_lengths(tokens: int, mean: float, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths as a batch of documents has them, log-normal: many short ones, a few long ones; `tokens` in all."""
    draw = random.Random(seed)
    sigma = 1.2
    lengths = []
    while (left := tokens - sum(lengths)) > 0:
        length = int(draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))
        lengths.append(max(1, min(length, longest, left)))
    return tuple(lengths)


@dataclass(frozen=True)
class Shape:
    """Self-attention: `batch` sequences of `seqlen`, or packed ones of `lengths`."""

    name: str
    heads: int
    heads_kv: int
    head_dim: int
    batch: int = 1
    seqlen: int = 0
    lengths: tuple[int, ...] = ()
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    sink: bool = False

    @property
    def packed(self) -> bool:
        return bool(self.lengths)

    @property
    def rows(self) -> tuple[int, int]:
        """batch and seqlen of the tensors: packed ones have a batch of one here."""
        return (1, sum(self.lengths)) if self.packed else (self.batch, self.seqlen)

    @property
    def plain(self) -> bool:
        return self.window == (-1, -1) and not (self.chunk or self.softcap or self.sink)

    @cached_property
    def pairs(self) -> int:
        """Pairs of a query and a key that are seen, per head."""
        mask = self.causal, *self.window, self.chunk
        lengths = self.lengths or (self.seqlen,) * self.batch
        return sum(seen_pairs(n, n, *mask) for n in lengths)

    def flops(self, mode: str) -> float:
        """By the paper's count (arXiv 2407.08608, section 4.1), of the pairs that are seen."""
        return 4 * self.heads * self.head_dim * self.pairs * (2.5 if mode == "bwd" else 1.0)

    def arguments(self) -> dict:
        """Of flash3's functions, without the sink's tensor."""
        return {
            "causal": self.causal,
            "window_size": self.window,
            "attention_chunk": self.chunk,
            "softcap": self.softcap,
        }

    def without(self) -> Shape:
        """The dense causal or full call that this one is compared with: the same tensors, or, of packed sequences,
        equal ones with the same number of tokens and about as much work."""
        shape = {"heads": self.heads, "heads_kv": self.heads_kv, "head_dim": self.head_dim}
        if not self.packed:
            sizes = {"batch": self.batch, "seqlen": self.seqlen}
        else:
            tokens = sum(self.lengths)
            length = round(sum(n * n for n in self.lengths) / tokens)
            sizes = {"batch": max(1, round(tokens / length)), "seqlen": length}
        return Shape(f"{self.name}, plain", causal=self.causal, **shape, **sizes)


MHA, GQA = (
    {"heads": 16, "heads_kv": 16, "head_dim": 128},
    {"heads": 32, "heads_kv": 8, "head_dim": 128},
)
SMALL_HEADS = {"heads": 32, "heads_kv": 32, "head_dim": 64}
GEMMA, GPT_OSS = (
    {"heads": 16, "heads_kv": 8, "head_dim": 256},
    {"heads": 64, "heads_kv": 8, "head_dim": 64},
)
DOCUMENTS = document_lengths(32768, 600, 16384)

SHAPES = (
    Shape("window 1024, 8k", **MHA, batch=4, seqlen=8192, window=(1024, 0)),
    Shape("window 1024, 32k", **MHA, seqlen=32768, window=(1024, 0)),
    Shape("window 1024, 32k, d64", **SMALL_HEADS, seqlen=32768, window=(1024, 0)),
    Shape("window 512 to both sides, 32k", **MHA, seqlen=32768, window=(512, 512), causal=False),
    Shape("window 4096, 32k, 32/8 heads", **GQA, seqlen=32768, window=(4096, 0)),
    Shape("chunk 8192, 32k, 32/8 heads", **GQA, seqlen=32768, chunk=8192),
    Shape("softcap 50, 8k", **MHA, batch=4, seqlen=8192, softcap=50.0),
    Shape("softcap 50, 8k, d256", **GEMMA, batch=4, seqlen=8192, softcap=50.0),
    Shape("softcap 50, window 4096, 16k, d256", **GEMMA, seqlen=16384, softcap=50.0, window=(4096, 0)),
    Shape("sinks, 8k, 64/8 heads, d64", **GPT_OSS, seqlen=8192, sink=True),
    Shape("sinks, window 128, 8k, 64/8 heads, d64", **GPT_OSS, seqlen=8192, sink=True, window=(127, 0)),
    Shape("packed, 16 x 2k", **MHA, lengths=(2048,) * 16),
    Shape("packed, 64 x 512", **MHA, lengths=(512,) * 64),
    Shape("documents, 32k tokens", **MHA, lengths=DOCUMENTS),
    Shape("documents, 32k tokens, 32/8 heads", **GQA, lengths=DOCUMENTS),
    Shape("documents, window 1024", **MHA, lengths=DOCUMENTS, window=(1024, 0)),
)  # fmt: skip


def named(match: str) -> list[Shape]:
    """Those in whose name the regular expression is found. Raises ValueError when it is in none."""
    found = [shape for shape in SHAPES if re.search(match, shape.name)]
    if not found:
        raise ValueError(f"--match: {match!r} is found in no shape's name")
    return found
