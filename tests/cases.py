"""The shapes that tests run over, each with a name, and the random tensors of a shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# (seqlen_q, seqlen_k). Lengths lie beside tile edges (64, 80, 128, 176, 192) and their multiples, on both sides, with
# either side longer; where seqlen_q is longer, the causal mask leaves rows without a key.
TINY = [(1, 1), (1, 2), (5, 1), (2, 9), (17, 63), (31, 65)]
SHORT = [
    (63, 97),
    (65, 64),
    (64, 64),
    (79, 81),
    (96, 175),
    (127, 129),
    (128, 128),
    (160, 177),
    (193, 192),
]
MEDIUM = [
    (191, 353),
    (225, 224),
    (320, 449),
    (513, 77),
    (384, 1),
    (1, 1025),
    (777, 1291),
    (1024, 1024),
]
LONG = [(1, 4097), (2, 16411), (1537, 2049), (3001, 2999)]
EMPTY = [(0, 5), (7, 0), (0, 0)]

HEAD_DIMS = list(range(8, 129, 8))
WIDE_HEAD_DIMS = list(range(136, 257, 8))
HEADS = [(1, 1), (6, 6), (6, 2), (6, 1), (5, 1), (8, 4), (12, 3), (16, 2)]  # (query, key/value)
HALF_DTYPES = [torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Inputs:
    """q, dout (b, sq, hq, d); k, v (b, sk, hk, d); dlse (b, hq, sq) float32, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers in another dtype; dlse keeps at least float32."""
        tensors = (x.to(dtype) for x in (self.q, self.k, self.v, self.dout))
        dlse_dtype = torch.promote_types(dtype, torch.float32)
        return Inputs(*tensors, None if self.dlse is None else self.dlse.to(dlse_dtype))


@dataclass(frozen=True)
class Case:
    seqlen_q: int
    seqlen_k: int
    head_dim: int = 64
    causal: bool = False
    num_heads_q: int = 2
    num_heads_kv: int = 2
    batch: int = 2
    head_dim_v: int | None = None  # head_dim

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return (
            f"b{self.batch}-sq{self.seqlen_q}-sk{self.seqlen_k}-h{self.num_heads_q}_{self.num_heads_kv}"
            f"-d{self.head_dim}{f'_{self.head_dim_v}' if self.head_dim_v else ''}-{mask}"
        )

    def with_(self, **changes) -> Case:
        return replace(self, **changes)

    def inputs(self, dtype, device="cpu", *, dlse: bool = False, magnitude: float = 1.0) -> Inputs:
        """Normal random tensors; q, k and v times `magnitude`."""
        generator = torch.Generator(device).manual_seed(20)

        def normal(*shape: int, dtype=dtype) -> Tensor:
            return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(
                dtype
            )

        b, d, dv = self.batch, self.head_dim, self.head_dim_v or self.head_dim
        q = normal(b, self.seqlen_q, self.num_heads_q, d) * magnitude
        k = normal(b, self.seqlen_k, self.num_heads_kv, d) * magnitude
        v = normal(b, self.seqlen_k, self.num_heads_kv, dv) * magnitude
        dout = normal(b, self.seqlen_q, self.num_heads_q, dv)
        lse_dtype = torch.promote_types(dtype, torch.float32)
        lse_gradient = normal(b, self.num_heads_q, self.seqlen_q, dtype=lse_dtype) if dlse else None
        return Inputs(q, k, v, dout, lse_gradient)


def both_masks(cases: list[Case]) -> list[Case]:
    return [case.with_(causal=causal) for causal in (False, True) for case in cases]


def by_length(lengths: list[tuple[int, int]], **fields) -> list[Case]:
    return both_masks([Case(sq, sk, **fields) for sq, sk in lengths])


def by_heads(heads: list[tuple[int, int]], **fields) -> list[Case]:
    return both_masks([Case(num_heads_q=hq, num_heads_kv=hk, **fields) for hq, hk in heads])


def by_head_dim(head_dims: list[int], **fields) -> list[Case]:
    return both_masks([Case(head_dim=d, **fields) for d in head_dims])
