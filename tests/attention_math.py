"""The formula softmax(scale * Q K^T) V written plainly, independent of flash3, and runs that yield all five results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

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
    dsink: Tensor | None = None  # (hq)


def seen_keys(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    device=None,
) -> Tensor:
    """(sq, sk), True where the query sees the key."""
    p = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=device)
    left, right = window_size
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if causal:
        seen &= j <= p
    if left != -1:
        seen &= p - j <= left
    if right != -1:
        seen &= j - p <= right
    if attention_chunk:
        seen &= p.div(attention_chunk, rounding_mode="floor") == j // attention_chunk
    return seen


def attention_math(
    q,
    k,
    v,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse, every step in the dtype of the inputs; the whole score matrix is stored."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    # The scale goes to q, so that float16 scores of large inputs do not overflow.
    scores = torch.einsum("bihd,bjhd->bhij", q * scale, k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = seen_keys(seqlen_q, seqlen_k, causal, window_size, attention_chunk, q.device)
    scores = scores.masked_fill(~seen, -math.inf)
    if learnable_sink is not None:  # a key that all rows see, without a value
        sink = learnable_sink.to(q.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), -1)
    # A row of -inf only would make NaN: give it zeros, then overwrite what came of them.
    no_key = scores.isneginf().all(-1, keepdim=True)
    scores = scores.masked_fill(no_key, 0.0)
    probs = torch.softmax(scores, dim=-1).masked_fill(no_key, 0.0)[..., :seqlen_k]
    out = torch.einsum("bhij,bjhd->bihd", probs, v)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(no_key.squeeze(-1), -math.inf)
    return out, lse


def run(
    attention: Callable, inputs: Inputs, *, backward: bool = True, sink: Tensor | None = None
) -> Result:
    """Results of attention(q, k, v) -> (out, lse), or -> out only; the sink, if there is one, is a fourth argument."""
    leaves = [inputs.q, inputs.k, inputs.v] + ([] if sink is None else [sink])
    leaves = [x.detach().requires_grad_(backward) for x in leaves]
    result = attention(*leaves)
    out, lse = result if isinstance(result, tuple) else (result, None)
    if not backward:
        return Result(out, lse)
    if inputs.dlse is None:
        gradients = torch.autograd.grad(out, leaves, inputs.dout)
    else:
        gradients = torch.autograd.grad(
            (out, lse), leaves, (inputs.dout, inputs.dlse.to(lse.dtype))
        )
    return Result(out.detach(), None if lse is None else lse.detach(), *gradients)


def run_flash3(
    inputs: Inputs, *, backward: bool = True, learnable_sink: Tensor | None = None, **arguments
) -> Result:
    def attention(q, k, v, sink=None):
        return flash3.flash_attn_func(q, k, v, return_lse=True, learnable_sink=sink, **arguments)

    return run(attention, inputs, backward=backward, sink=learnable_sink)


def run_float64(
    inputs: Inputs, *, backward: bool = True, learnable_sink: Tensor | None = None, **arguments
) -> Result:
    """What is right: the formula in float64."""
    return run(
        lambda q, k, v, sink=None: attention_math(q, k, v, learnable_sink=sink, **arguments),
        inputs.to(torch.float64),
        backward=backward,
        sink=None if learnable_sink is None else learnable_sink.double(),
    )


def run_same_dtype(
    inputs: Inputs, *, backward: bool = True, learnable_sink: Tensor | None = None, **arguments
) -> Result:
    """What PyTorch makes of it: the formula in the inputs' own dtype; lse, a float32 result, from float32 inputs."""
    result = run(
        lambda q, k, v, sink=None: attention_math(q, k, v, learnable_sink=sink, **arguments),
        inputs,
        backward=backward,
        sink=None if learnable_sink is None else learnable_sink.to(inputs.q.dtype),
    )
    with torch.no_grad():
        tensors = (x.float() for x in (inputs.q, inputs.k, inputs.v))
        _, lse = attention_math(*tensors, learnable_sink=learnable_sink, **arguments)
    return replace(result, lse=lse)
