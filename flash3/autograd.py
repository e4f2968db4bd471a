"""Gradients of ``flash3::fwd``: one formula, reached by two roads.

Eager calls go through :class:`FlashAttention`, a hand-written ``autograd.Function`` that costs a few microseconds.
The formula is also registered on the operator itself, for everything that traces or transforms it: ``torch.compile``,
``torch.func`` and direct calls of ``torch.ops.flash3.fwd``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash3 import ops

_below_autograd = torch._C._AutoDispatchBelowAutograd
transforms_active = torch._C._are_functorch_transforms_active


# The operators' arguments behind `order` are the sink, then those that both passes take (_SCORES of ops.py).
# Eager calls that need none of them leave them out; the registered formula meets all of them.


def attention(*inputs) -> tuple[Tensor, Tensor]:
    """``flash3::fwd`` by the cheapest road that differentiates where it is asked to. Arguments are checked already."""
    return _by_cheapest_road(ops.fwd, FlashAttention, inputs, inputs[6:7])


def varlen_attention(*inputs) -> tuple[Tensor, Tensor]:
    """``flash3::varlen_fwd``, likewise."""
    return _by_cheapest_road(ops.varlen_fwd, VarlenFlashAttention, inputs, inputs[10:11])


def _by_cheapest_road(
    op, function: type[torch.autograd.Function], inputs: tuple, sinks: tuple = ()
):
    """Calls ``op``, or ``function``, its eager autograd node.

    The inputs begin with q, k and v; ``sinks`` holds the sink, or None, of a call that has arguments so far back.
    """
    if torch.compiler.is_compiling():
        return op(*inputs)
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            "flash3: forward-mode differentiation (jvp, dual tensors) is not supported"
        )
    if transforms_active():
        return op(*inputs)
    if torch.is_grad_enabled() and (
        any(x.requires_grad for x in inputs[:3])
        or any(x is not None and x.requires_grad for x in sinks)
    ):
        return function.apply(*inputs)
    with _below_autograd():
        return op(*inputs)


class FlashAttention(torch.autograd.Function):
    """Eager autograd node. It calls the operators below the autograd layer, past their registered formula."""

    @staticmethod
    def forward(ctx, *inputs):
        with _below_autograd():
            outputs = ops.fwd(*inputs)
        _setup_context(ctx, inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx, dout, dlse):
        return _backward(ctx, dout, dlse)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, ctx.softmax_scale, ctx.causal, ctx.order, *extras = inputs
    _save(ctx, (q, k, v), output, extras)


def _save(ctx, tensors: tuple, output: tuple[Tensor, Tensor], extras: list) -> None:
    sink, *scores = extras or (None,)
    ctx.scores = tuple(scores)
    ctx.save_for_backward(*output, sink, *tensors)
    ctx.set_materialize_grads(False)  # an lse that nobody differentiates costs no tensor of zeros


def _backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 11
    out, lse, sink, q, k, v = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    args = (dout, q, k, v, out, lse, dlse, ctx.softmax_scale, ctx.causal, ctx.order)
    gradients = _gradients(ops.bwd, (*args, *ctx.scores))
    if sink is None:
        return (*gradients, *(None,) * 8)
    dsink = _sink_gradient(ctx.needs_input_grad[6], (dout, out, lse, dlse, sink))
    return (*gradients, None, None, None, dsink, *(None,) * 4)


def _sink_gradient(wanted: bool, args: tuple) -> Tensor | None:
    return _gradients(ops.sink_bwd, args) if wanted else None


def _gradients(op, args: tuple):
    if (
        torch.is_grad_enabled()
    ):  # create_graph=True: the operator itself says that it has no derivative
        return op(*args)
    with _below_autograd():
        return op(*args)


class VarlenFlashAttention(torch.autograd.Function):
    """Eager autograd node of ``flash3::varlen_fwd``."""

    @staticmethod
    def forward(ctx, *inputs):
        with _below_autograd():
            outputs = ops.varlen_fwd(*inputs)
        _setup_varlen_context(ctx, inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx, dout, dlse):
        return _varlen_backward(ctx, dout, dlse)


def _setup_varlen_context(ctx, inputs, output) -> None:
    *tensors, ctx.softmax_scale, ctx.causal, ctx.order = inputs[:10]
    _save(ctx, tensors, output, inputs[10:])


def _varlen_backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 15
    out, lse, sink, q, k, v, *sequences = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    args = (dout, q, k, v, out, lse, dlse, *sequences)
    args += (ctx.softmax_scale, ctx.causal, ctx.order, *ctx.scores)
    gradients = _gradients(ops.varlen_bwd, args)
    if sink is None:
        return (*gradients, *(None,) * 12)
    dsink = _sink_gradient(ctx.needs_input_grad[10], (dout, out, lse, dlse, sink))
    return (*gradients, *(None,) * 7, dsink, *(None,) * 4)


def _backward_of_backward(ctx, *grads: Tensor) -> None:
    raise NotImplementedError(
        "flash3: second derivatives are not supported; flash3::bwd, varlen_bwd and sink_bwd are not differentiable"
    )


torch.library.register_autograd("flash3::fwd", _backward, setup_context=_setup_context)
torch.library.register_autograd("flash3::bwd", _backward_of_backward)
torch.library.register_autograd(
    "flash3::varlen_fwd", _varlen_backward, setup_context=_setup_varlen_context
)
torch.library.register_autograd("flash3::varlen_bwd", _backward_of_backward)
torch.library.register_autograd("flash3::sink_bwd", _backward_of_backward)
