"""What is measured: one `Cell` is one shape in one mode; `grid` and `named_cells` list the cells of a run."""

import re
from dataclasses import asdict, dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128)
TOKENS = 16384  # batch x seqlen, constant over the grid as in the FlashAttention-3 paper
HIDDEN = 2048  # heads x head_dim, constant over the grid
MASKS = {"full": (False,), "causal": (True,), "both": (False, True)}
MODES = {"fwd": ("fwd",), "bwd": ("bwd",), "both": ("fwd", "bwd")}


@dataclass(frozen=True)
class Cell:
    """One measurement, forward or backward alone. A cell of the grid is self-attention (seqlen_k == seqlen) without a
    name. With a causal mask the lengths are equal: where they are not, torch aligns it otherwise."""

    mode: str  # "fwd" | "bwd"
    dtype: str  # key of DTYPES
    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    heads_kv: int
    seqlen_k: int = 0  # 0: seqlen, which then counts the queries alone
    name: str = ""
    head_dim_v: int = 0  # of v and out; 0: head_dim, which then counts that of q and k alone

    @property
    def keys(self) -> int:
        return self.seqlen_k or self.seqlen

    @property
    def values_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def flops(self) -> float:
        """Floating point operations by the paper's count (arXiv 2407.08608, section 4.1):
        4 b h sq sk d forward, half of it when causal, 2.5 times it backward. Of the GEMMs Q K^T, dQ and dK have
        head_dim, P V, dP and dV that of v."""
        gemms = (1, 1) if self.mode == "fwd" else (3, 2)
        columns = gemms[0] * self.head_dim + gemms[1] * self.values_dim
        scores = self.batch * self.heads * self.seqlen * self.keys
        return 2 * scores * columns * (0.5 if self.causal else 1.0)

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    def tflops(self, milliseconds: float) -> float:
        return self.flops / milliseconds * 1e-9

    def as_dict(self) -> dict:
        return {**asdict(self), "flops": self.flops}

    def __str__(self) -> str:
        v = f" v{self.head_dim_v}" if self.head_dim_v else ""
        return (
            self.name or f"{self.mode} {self.dtype} d{self.head_dim}{v} {self.mask} {self.seqlen}"
        )


def grid(
    modes,
    dtype: str = "bf16",
    head_dims=HEAD_DIMS,
    seqlens=SEQLENS,
    causals=(False, True),
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    group: int = 1,
    head_dim_v: int = 0,
) -> list[Cell]:
    """Cells of the product, with batch = tokens / seqlen and heads = hidden / head_dim.

    group: query heads per key/value head (1 is multi-head attention). head_dim_v: of v and out, 0 for head_dim.
    Raises ValueError when a shape doesn't divide evenly.
    """
    for head_dim in head_dims:
        if head_dim < 1 or hidden % head_dim:
            raise ValueError(f"--hidden {hidden} is not a multiple of head_dim {head_dim}")
        if group < 1 or (hidden // head_dim) % group:
            raise ValueError(f"--group {group} does not divide {hidden // head_dim} heads")
    for seqlen in seqlens:
        if seqlen < 1 or tokens % seqlen:
            raise ValueError(f"--tokens {tokens} is not a multiple of seqlen {seqlen}")
    return [
        Cell(
            mode, dtype, d, causal, s, tokens // s, hidden // d, hidden // d // group,
            head_dim_v=head_dim_v,
        )
        for mode in modes
        for d in head_dims
        for causal in causals
        for s in seqlens
    ]  # fmt: skip


# (name, batch, query heads, key/value heads, head_dim, mask, queries, keys)
NAMED = (
    *[(f"Llama 3 8B prefill, {s >> 10}k", 1, 32, 8, 128, "causal", s, s) for s in (2048, 8192, 32768, 131072)],
    *[(f"Llama 3 8B prefill, batch 8, {s >> 10}k", 8, 32, 8, 128, "causal", s, s) for s in (2048, 8192, 32768)],
    *[(f"Llama 3 70B prefill, {s >> 10}k", 1, 64, 8, 128, "causal", s, s) for s in (2048, 8192, 32768, 131072)],
    *[(f"Llama 3 70B prefill, batch 8, {s >> 10}k", 8, 64, 8, 128, "causal", s, s) for s in (2048, 8192)],
    *[(f"multi-query, {s >> 10}k", 1, 32, 1, 128, "causal", s, s) for s in (2048, 8192, 32768)],
    *[(f"8 heads, {s}", 1, 8, 8, 128, "causal", s, s) for s in (512, 1024, 2048)],
    *[(f"image transformer, {s} patches", 64, 16, 16, 64, "full", s, s) for s in (197, 1024)],
    *[(f"{q} queries, {k >> 10}k keys", 1, 32, 8, 128, "full", q, k) for k in (8192, 131072) for q in (1, 16, 64)],
    ("cross-attention, 4k x 512", 4, 16, 16, 128, "full", 4096, 512),
    ("one million tokens", 1, 8, 8, 128, "causal", 1 << 20, 1 << 20),
)  # fmt: skip


def named_cells(mode: str, dtype: str = "bf16", match: str = "") -> list[Cell]:
    """Shapes that people run, those in whose name the regular expression `match` is found. Raises ValueError when it is
    in none."""
    found = [
        Cell(mode, dtype, d, mask == "causal", sq, batch, heads, heads_kv, sk, name)
        for name, batch, heads, heads_kv, d, mask, sq, sk in NAMED
        if re.search(match, name)
    ]
    if not found:
        raise ValueError(f"--match: {match!r} is found in no shape's name")
    return found
