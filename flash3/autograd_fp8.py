"""Gradient of ``flash3::fp8_attention``: float8 forward, 16-bit backward. docs/numerics.md derives what it computes."""

from __future__ import annotations

import torch
from torch import Tensor

from flash3 import autograd, ops, ops_fp8


def fp8_attention(*inputs) -> tuple[Tensor, Tensor]:
    """``flash3::fp8_attention`` by the cheapest road that differentiates where it is asked to."""
    return autograd._by_cheapest_road(ops_fp8.fp8_attention, Fp8FlashAttention, inputs)


class Fp8FlashAttention(torch.autograd.Function):
    """Eager autograd node of ``flash3::fp8_attention``."""

    @staticmethod
    def forward(ctx, *inputs):
        with autograd._below_autograd():
            outputs = ops_fp8.fp8_attention(*inputs)
        _setup_context(ctx, inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx, dout, dlse):
        return _backward(ctx, dout, dlse)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, ctx.softmax_scale, ctx.causal, ctx.deterministic, *_, ctx.recompute = inputs
    ctx.save_for_backward(q, k, v, *(() if ctx.recompute else output))
    ctx.set_materialize_grads(False)


def _backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 11
    q, k, v, *output = ctx.saved_tensors
    order = int(ctx.deterministic)
    forward = (q, k, v, ctx.softmax_scale, ctx.causal, order)
    out, lse = autograd._gradients(ops.fwd, forward) if ctx.recompute else output
    if dout is None:
        dout = torch.zeros_like(out)
    args = (dout, q, k, v, out, lse, dlse, ctx.softmax_scale, ctx.causal, order)
    return (*autograd._gradients(ops.bwd, args), *(None,) * 8)


torch.library.register_autograd("flash3::fp8_attention", _backward, setup_context=_setup_context)
