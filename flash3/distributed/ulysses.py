"""Ulysses attention: between the projections the sequence is divided, during attention the heads are.

Jacobs et al., DeepSpeed Ulysses (2023). One all-to-all turns (whole heads, part of the sequence) into (part of the
heads, whole sequence), another turns the result back. The kernels see ordinary calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash3 import functional, varlen
from flash3.distributed import layout
from flash3.distributed.call import Call, checked, checked_packed
from flash3.distributed.communicator import Communicator, communicator


def ulysses_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group=None,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    deterministic: bool = False,
    return_lse: bool = False,
    order: str = "zigzag",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence whose parts lie on the ranks of ``group``, by exchanging heads for positions.

    Arguments, results and errors are those of :func:`flash3.distributed.ring_attn_func`. The number of ranks must
    divide heads_q; and divide heads_kv or be a multiple of it, in which case each key/value head is sent to several
    ranks.
    """
    comm = communicator(group)
    call = checked(comm, q, k, v, softmax_scale, causal, deterministic, order)
    q, k, v = _to_heads(call, q, k, v)
    out, lse = functional.flash_attn_func(
        q, k, v, call.softmax_scale, causal, deterministic=deterministic, return_lse=True
    )
    out = _to_positions(call, out)
    return (out, _lse_to_positions(call, lse)) if return_lse else out


def ulysses_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    group=None,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    deterministic: bool = False,
    return_lse: bool = False,
    order: str = "zigzag",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`ulysses_attn_func` for packed documents, one after the other, cut for the ranks wherever it falls.

    Arguments, results and errors are those of :func:`flash3.distributed.allgather_attn_varlen_func`, but for
    heads_per_step; the numbers of heads are bound as in :func:`ulysses_attn_func`.
    """
    comm = communicator(group)
    call = checked_packed(comm, q, k, v, cu_seqlens, softmax_scale, causal, deterministic, order)
    q, k, v = (x.squeeze(0) for x in _to_heads(call, *(x.unsqueeze(0) for x in (q, k, v))))
    out, lse = varlen.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        q.shape[0],
        q.shape[0],
        softmax_scale=call.softmax_scale,
        causal=causal,
        deterministic=deterministic,
        return_lse=True,
    )
    out = _to_positions(call, out.unsqueeze(0)).squeeze(0)
    return (out, _lse_to_positions(call, lse.unsqueeze(0)).squeeze(0)) if return_lse else out


def _to_heads(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """This rank's heads of the whole sequence, from all heads (b, local, heads, d) of its part."""
    size = call.comm.size
    _check_heads(size, q.shape[2], k.shape[2])
    copies = max(1, size // k.shape[2])
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    return tuple(
        _Exchange.apply(x, call, _heads_for_positions, _positions_for_heads) for x in (q, k, v)
    )


def _to_positions(call: Call, x: Tensor) -> Tensor:
    """All heads of this rank's part, from its heads of the whole."""
    return _Exchange.apply(x, call, _positions_for_heads, _heads_for_positions)


def _lse_to_positions(call: Call, lse: Tensor) -> Tensor:
    """(b, heads / size, whole) -> (b, heads, local)."""
    return _to_positions(call, lse.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)


def _check_heads(size: int, heads_q: int, heads_kv: int) -> None:
    if heads_q % size != 0:
        raise ValueError(
            f"q: the number of heads must be a multiple of the number of ranks, {size}, got {heads_q}; ring_attn_func "
            "takes any"
        )
    if heads_kv % size != 0 and size % heads_kv != 0:
        raise ValueError(
            f"k, v: the number of heads must be a multiple or a divisor of the number of ranks, {size}, got "
            f"{heads_kv}; ring_attn_func takes any"
        )


class _Exchange(torch.autograd.Function):
    """``there`` and, for the gradient, ``back``: the two functions below."""

    @staticmethod
    def forward(ctx, x, call, there, back):
        ctx.call, ctx.back = call, back
        return there(x, call)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return ctx.back(gradient, ctx.call), None, None, None


def _heads_for_positions(x: Tensor, call: Call) -> Tensor:
    """(b, local, heads, d) -> (b, whole, heads / size, d)."""
    comm: Communicator = call.comm
    by_rank = x.unflatten(2, (comm.size, -1)).movedim(2, 0)  # (rank, b, local, heads / size, d)
    (received,) = comm.exchange(by_rank).wait()
    return layout.in_sequence_order(received, call.order)


def _positions_for_heads(x: Tensor, call: Call) -> Tensor:
    """(b, whole, heads / size, d) -> (b, local, heads, d)."""
    comm: Communicator = call.comm
    (received,) = comm.exchange(layout.in_rank_order(x, comm.size, call.order)).wait()
    return received.movedim(0, 2).flatten(2, 3)
