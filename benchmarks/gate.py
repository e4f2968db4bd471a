"""The correctness gate: a kernel whose result is wrong is not timed.

Results are compared in blocks of 64 consecutive positions of one head, so that one bad tile shows
among thousands of good ones:

    rms(ours - reference) <= BOUND[dtype] * (rms(reference) + 0.1 * rms(reference, whole tensor))

Both sides are rounded to the dtype (bf16: relative 2^-9, fp16: 2^-12, for the probabilities and
again for the result), which measures around 0.1 of the bound. The second term is for blocks whose
exact value is close to zero. This is a guard for benchmarks; tests/ hold the kernels to float64.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

BOUND = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
BLOCK = 64
RESULTS = {"fwd": ("out",), "bwd": ("dq", "dk", "dv")}


class WrongResult(RuntimeError):
    """flash3 and the reference differ by more than the bound."""


@dataclass(frozen=True)
class GateReport:
    """Largest left side over right side of the rule, per result; all at most 1."""

    reference: str
    share_of_bound: dict[str, float]

    def as_dict(self) -> dict:
        return {"reference": self.reference, "share_of_bound": self.share_of_bound}


def block_rms(x: torch.Tensor) -> torch.Tensor:
    """(batch, seqlen, heads, head_dim) -> fp32 (batch, blocks, heads)."""
    squares = x.float().square().mean(-1)  # (batch, seqlen, heads)
    seqlen = squares.shape[1]
    blocks = -(-seqlen // BLOCK)
    squares = F.pad(squares, (0, 0, 0, blocks * BLOCK - seqlen))
    return squares.unflatten(1, (blocks, BLOCK)).mean(2).sqrt()


def share_of_bound(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest error over allowed error; infinite when `ours` holds a NaN or Inf."""
    error = block_rms(ours.float() - reference.float())
    expected = block_rms(reference)
    allowed = BOUND[ours.dtype] * (expected + 0.1 * expected.square().mean().sqrt())
    worst = (error / allowed.clamp_min(1e-30)).max().item()
    return worst if worst == worst else float("inf")


def check(mode: str, ours: tuple, reference: tuple, reference_name: str) -> GateReport:
    """Compares results in (batch, seqlen, heads, head_dim); raises WrongResult beyond the bound."""
    shares = {
        name: share_of_bound(a, b)
        for name, a, b in zip(RESULTS[mode], ours, reference, strict=True)
    }
    for name, share in shares.items():
        if share > 1:
            raise WrongResult(
                f"{name} differs from {reference_name} by {share:.3g} times the bound of "
                f"{BOUND[ours[0].dtype]:g}"
            )
    return GateReport(reference_name, shares)
