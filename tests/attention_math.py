"""The formula softmax(scale * Q K^T) V written plainly, independent of flash3, and runs that yield all five results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cases import Inputs
from torch import Tensor

import flash3


@dataclass(frozen=True)
class Result:
    out: Tensor  # (b, sq, hq, d)
    lse: Tensor | None  # (b, hq, sq)
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


def attention_math(
    q, k, v, softmax_scale: float | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """out and lse, every step in the dtype of the inputs; the whole score matrix is stored."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    # The scale goes to q, so that float16 scores of large inputs do not overflow.
    scores = torch.einsum("bihd,bjhd->bhij", q * scale, k)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(seqlen_k - seqlen_q)
    no_key = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -math.inf)
    # A row of -inf only would make NaN: give it zeros, then overwrite what came of them.
    scores = scores.masked_fill(no_key, 0.0)
    probs = torch.softmax(scores, dim=-1).masked_fill(no_key, 0.0)
    out = torch.einsum("bhij,bjhd->bihd", probs, v)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(no_key.squeeze(-1), -math.inf)
    return out, lse


def run(attention: Callable, inputs: Inputs, *, backward: bool = True) -> Result:
    """Results of attention(q, k, v) -> (out, lse), or -> out only."""
    q, k, v = (x.detach().requires_grad_(backward) for x in (inputs.q, inputs.k, inputs.v))
    result = attention(q, k, v)
    out, lse = result if isinstance(result, tuple) else (result, None)
    if not backward:
        return Result(out, lse)
    if inputs.dlse is None:
        gradients = torch.autograd.grad(out, (q, k, v), inputs.dout)
    else:
        gradients = torch.autograd.grad(
            (out, lse), (q, k, v), (inputs.dout, inputs.dlse.to(lse.dtype))
        )
    return Result(out.detach(), None if lse is None else lse.detach(), *gradients)


def run_flash3(inputs: Inputs, *, backward: bool = True, **arguments) -> Result:
    return run(
        lambda q, k, v: flash3.flash_attn_func(q, k, v, return_lse=True, **arguments),
        inputs,
        backward=backward,
    )


def run_float64(inputs: Inputs, *, backward: bool = True, **arguments) -> Result:
    """What is right: the formula in float64."""
    return run(
        lambda q, k, v: attention_math(q, k, v, **arguments),
        inputs.to(torch.float64),
        backward=backward,
    )


def run_same_dtype(inputs: Inputs, *, backward: bool = True, **arguments) -> Result:
    """What PyTorch makes of it: the formula in the inputs' own dtype; lse, a float32 result, from float32 inputs."""
    result = run(lambda q, k, v: attention_math(q, k, v, **arguments), inputs, backward=backward)
    with torch.no_grad():
        _, lse = attention_math(inputs.q.float(), inputs.k.float(), inputs.v.float(), **arguments)
    return Result(result.out, lse, result.dq, result.dk, result.dv)
