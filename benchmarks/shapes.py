"""What is measured: one `Cell` is one shape in one mode, `grid` lists the cells of a run."""

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
    """One measurement: self-attention (seqlen_q == seqlen_k), forward or backward alone."""

    mode: str  # "fwd" | "bwd"
    dtype: str  # key of DTYPES
    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    heads_kv: int

    @property
    def flops(self) -> float:
        """Floating point operations by the paper's count (arXiv 2407.08608, section 4.1):
        4 b h s^2 d forward, half of it when causal, 2.5 times it backward."""
        forward = 4 * self.batch * self.heads * self.seqlen**2 * self.head_dim
        return forward * (0.5 if self.causal else 1.0) * (2.5 if self.mode == "bwd" else 1.0)

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    def tflops(self, milliseconds: float) -> float:
        return self.flops / milliseconds * 1e-9

    def as_dict(self) -> dict:
        return {**asdict(self), "flops": self.flops}

    def __str__(self) -> str:
        return f"{self.mode} {self.dtype} d{self.head_dim} {self.mask} {self.seqlen}"


def grid(
    modes,
    dtype: str = "bf16",
    head_dims=HEAD_DIMS,
    seqlens=SEQLENS,
    causals=(False, True),
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    group: int = 1,
) -> list[Cell]:
    """Cells of the product, with batch = tokens / seqlen and heads = hidden / head_dim.

    group: query heads per key/value head (1 is multi-head attention).
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
        Cell(mode, dtype, d, causal, s, tokens // s, hidden // d, hidden // d // group)
        for mode in modes
        for d in head_dims
        for causal in causals
        for s in seqlens
    ]
