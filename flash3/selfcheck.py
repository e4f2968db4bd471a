"""Small attention problems with known answers, for ``python -m flash3.doctor``.

Each check returns whether all errors are within the accepted one, and a line that shows them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

import flash3
from flash3 import reference

# Accepted error of a small problem, as a share of the largest value: a few roundings of the dtype, far below what a
# wrong index or mask does.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 4e-2,
}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
# What a row of local masks is checked with: every limit at once.
LIMITS = {"window_left": 90, "window_right": 30, "attention_chunk": 128, "softcap": 4.0}


@dataclass
class Problem:
    """A small attention problem with grouped heads and no round length, its gradient, and its answers in float64."""

    inputs: tuple[Tensor, Tensor, Tensor]  # q (b, sq, hq, d), k (b, sk, hk, d), v (b, sk, hk, dv)
    dout: Tensor
    scale: float
    causal: bool
    limits: dict = field(default_factory=dict)  # as LIMITS, or none

    @classmethod
    def draw(
        cls,
        dtype: torch.dtype,
        head_dim: int,
        mask: str,
        head_dim_v: int | None = None,
        seqlen_q: int = 150,
    ) -> Problem:
        """``mask`` is that of a kernel row: full, causal or local; ``head_dim_v`` None is head_dim."""
        head_dim_v = head_dim_v or head_dim
        generator = torch.Generator().manual_seed(0)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(2, *sizes, generator=generator).to(dtype)

        inputs = (draw(seqlen_q, 4, head_dim), draw(201, 2, head_dim), draw(201, 2, head_dim_v))
        limits = LIMITS if mask == "local" else {}
        return cls(inputs, draw(seqlen_q, 4, head_dim_v), head_dim**-0.5, mask == "causal", limits)

    def forward(self) -> tuple[Tensor, Tensor]:
        return reference.attention_forward(*self._double(), self.scale, self.causal, **self.limits)

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = self.forward()
        return reference.attention_backward(
            self.dout.double(),
            *self._double(),
            out,
            lse,
            None,
            self.scale,
            self.causal,
            **self.limits,
        )

    def _double(self) -> list[Tensor]:
        return [x.double() for x in self.inputs]


def textbook_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Attention by its definition, with the whole score matrix: what the reference itself is checked against."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if causal:
        seqlen_q, seqlen_k = scores.shape[-2:]
        hidden = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).triu(seqlen_k - seqlen_q + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest expected value; NaN if anything is."""
    difference = (got.detach().cpu().double() - expected.detach().double()).abs().max()
    return (difference / expected.abs().max()).item()


def judge(label: str, errors: dict[str, float], tolerance: float) -> tuple[bool, str]:
    """Whether all errors are within the tolerance (NaN is not), and the line that shows them."""
    good = all(error <= tolerance for error in errors.values())
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    verdict = "" if good else "  <- WRONG"
    return good, f"{label}: error {shown} of the largest value (accepted {tolerance:.0e}){verdict}"


def check_cpu_path(causal: bool) -> tuple[bool, str]:
    """The public function on CPU, forward and backward, against the definition of attention in float64."""
    mask = "causal" if causal else "full"
    problem = Problem.draw(torch.float32, 64, mask)
    leaves = [x.clone().requires_grad_() for x in problem.inputs]
    out = flash3.flash_attn_func(*leaves, causal=causal)
    gradients = torch.autograd.grad(out, leaves, problem.dout)
    exact_leaves = [x.double().requires_grad_() for x in problem.inputs]
    exact = textbook_attention(*exact_leaves, problem.scale, causal)
    exact_gradients = torch.autograd.grad(exact, exact_leaves, problem.dout.double())
    errors = {"out": relative_error(out, exact)}
    for name, got, expected in zip(("dq", "dk", "dv"), gradients, exact_gradients, strict=True):
        errors[name] = relative_error(got, expected)
    return judge(f"float32 {mask}", errors, TOLERANCE[torch.float32])


def check_row(row: dict, device: torch.device) -> tuple[bool, str]:
    """One kernel of flash3._C.variants() on ``device``, against the reference in float64."""
    try:
        dtype = DTYPES[row["dtype"]]
        key = dtype, row["head_dim"], row["mask"], row["head_dim_v"]
        # Rows that differ in m alone are chosen by the number of queries: one tile, not quite full.
        fitting = {"seqlen_q": row["tile"]["m"] - 42} if row["pass"] == "fwd" else {}
        problem = Problem.draw(*key, **fitting)
        fwd, bwd = _packed_ops if row["layout"] == "packed" else _dense_ops
        if row["pass"] == "fp8":
            fwd = functools.partial(_fp8_fwd, promote_every=int(row["tile"]["two_level"]))
        if row["pass"] in ("fwd", "fp8"):
            errors = _forward_errors(problem, device, fwd)
        else:
            errors = _backward_errors(problem, device, bwd)
    except Exception as error:  # the other rows are worth a try
        return False, f"{row['name']}: {type(error).__name__}: {error}"
    return judge(row["name"], errors, TOLERANCE[dtype])


_dense_ops = torch.ops.flash3.fwd, torch.ops.flash3.bwd


def _packed_fwd(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, **limits):
    """What ``flash3::fwd`` returns, from ``flash3::varlen_fwd``."""
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    sequences = (*_sequences(q, k), None, None)
    out, lse = torch.ops.flash3.varlen_fwd(*packed, *sequences, scale, causal, **limits)
    return out.view(q.shape), lse.unflatten(1, q.shape[:2]).transpose(0, 1)


def _packed_bwd(dout, q, k, v, out, lse, dlse, scale: float, causal: bool, order: int, **limits):
    """What ``flash3::bwd`` returns without a gradient of lse, from ``flash3::varlen_bwd``."""
    packed = [x.flatten(0, 1) for x in (dout, q, k, v, out)]
    lse = lse.transpose(0, 1).flatten(1)
    sequences = (*_sequences(q, k), None, None)
    grads = torch.ops.flash3.varlen_bwd(
        *packed, lse, None, *sequences, scale, causal, order, **limits
    )
    return tuple(grad.view(x.shape) for grad, x in zip(grads, (q, k, v), strict=True))


def _fp8_fwd(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, *, promote_every: int):
    """``flash3::fp8_fwd`` of e4m3 tensors that stand for themselves."""
    no_scales, blocks = (None,) * 3, (128,) * 3
    return torch.ops.flash3.fp8_fwd(
        q, k, v, *no_scales, *blocks, scale, 1.0, causal, False, promote_every=promote_every
    )


_packed_ops = _packed_fwd, _packed_bwd


def _sequences(q: Tensor, k: Tensor) -> list[Tensor]:
    """cu_seqlens_q and cu_seqlens_k of dense tensors that are looked at as packed ones."""
    ends = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return [ends * q.shape[1], ends * k.shape[1]]


def _forward_errors(problem: Problem, device: torch.device, fwd) -> dict[str, float]:
    inputs = [x.to(device) for x in problem.inputs]
    out, lse = fwd(*inputs, problem.scale, problem.causal, **problem.limits)
    exact_out, exact_lse = problem.forward()
    return {"out": relative_error(out, exact_out), "lse": relative_error(lse, exact_lse)}


def _backward_errors(problem: Problem, device: torch.device, bwd) -> dict[str, float]:
    """Fed with the reference's out and lse, so that a build with no forward row of this kind can be checked."""
    dtype = problem.dout.dtype
    out, lse = problem.forward()
    saved = (out.to(device, dtype), lse.to(device, torch.float32))
    inputs = [x.to(device) for x in (problem.dout, *problem.inputs)]
    gradients = bwd(*inputs, *saved, None, problem.scale, problem.causal, False, **problem.limits)
    names = ("dq", "dk", "dv")
    triples = zip(names, gradients, problem.backward(), strict=True)
    return {name: relative_error(got, exact) for name, got, exact in triples}
