"""All-gather attention: every rank gathers the keys and values of a few heads at a time.

As in the training of Llama 3 (Grattafiori et al., 2024, section 3.3.2). The next heads are gathered while the kernels
work on these, and the gradients of these are returned to their owners while the kernels work on the next.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flash3 import reference
from flash3.distributed import layout
from flash3.distributed.call import Call, checked
from flash3.distributed.communicator import Arrival, communicator


def allgather_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group=None,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    heads_per_step: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    order: str = "zigzag",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence whose parts lie on the ranks of ``group``, with gathered keys and values.

    Arguments, results and errors are those of :func:`flash3.distributed.ring_attn_func`, and one more. Few large
    calls instead of one per rank, for memory: the keys and values of ``heads_per_step`` heads of the whole sequence,
    twice.

    Args:
        heads_per_step: key/value heads that are gathered at once, a divisor of heads_kv. None chooses a quarter of
            them, or the next divisor above.
    """
    comm = communicator(group)
    call = checked(comm, q, k, v, softmax_scale, causal, deterministic, order)
    heads = _heads_at_once(heads_per_step, k.shape[2])
    out, lse = _AllGatherAttention.apply(q, k, v, call, heads)
    return (out, lse) if return_lse else out


def _heads_at_once(asked: int | None, heads_kv: int) -> int:
    if asked is None:
        return next(n for n in range(-(-heads_kv // 4), heads_kv + 1) if heads_kv % n == 0)
    if not isinstance(asked, int) or isinstance(asked, bool):
        raise TypeError(f"heads_per_step: must be an int or None, got {type(asked).__name__}")
    if asked < 1 or heads_kv % asked != 0:
        raise ValueError(
            f"heads_per_step: must be a positive divisor of heads_kv, {heads_kv}, got {asked}"
        )
    return asked


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call, heads):
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = _forward(q, k, v, call, heads)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.heads = call, heads
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return None, None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        with torch._C._AutoDispatchBelowAutograd():
            gradients = _backward(dout, q, k, v, out, lse, dlse, ctx.call, ctx.heads)
        return *gradients, None, None


def _gathered(k: Tensor, v: Tensor, call: Call, heads: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first head, keys, values) of the whole sequence for ``heads`` heads at a time, the next on their way."""

    def gather(head: int) -> Arrival:
        return call.comm.gather(torch.stack([x[:, :, head : head + heads] for x in (k, v)]))

    arriving = gather(0)
    for head in range(0, k.shape[2], heads):
        (shards,) = arriving.wait()  # (ranks, 2, b, local, heads, d)
        if head + heads < k.shape[2]:
            arriving = gather(head + heads)
        yield head, *(layout.in_sequence_order(shards[:, i], call.order) for i in (0, 1))


def _query_chunks(call: Call, seqlen_local: int, seqlen_k: int) -> Iterator[tuple[slice, int]]:
    """(rows of the shard, number of keys that the last of them sees); one per chunk, or one in all without a mask."""
    if not call.causal:
        yield slice(0, seqlen_local), seqlen_k
        return
    held = layout.chunks_of(call.comm.rank, call.comm.size, call.order)
    length = seqlen_local // len(held)
    for position, chunk in enumerate(held):
        yield slice(position * length, (position + 1) * length), (chunk + 1) * length


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call, heads: int) -> tuple[Tensor, Tensor]:
    batch, seqlen, heads_q, _ = q.shape
    group = heads_q // k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_empty((batch, heads_q, seqlen), dtype=reference.accumulate_dtype(q.dtype))
    for head, keys, values in _gathered(k, v, call, heads):
        at = slice(head * group, (head + heads) * group)
        for rows, seen in _query_chunks(call, seqlen, keys.shape[1]):
            out[:, rows, at], lse[:, at, rows] = call.forward(
                q[:, rows, at], keys[:, :seen], values[:, :seen], call.causal
            )
    return out, lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    call: Call,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    returning: Arrival | None = None
    sums_of_owner: list[Tensor] = []  # (2, b, local, heads, d) for each step
    for head, keys, values in _gathered(k, v, call, heads):
        at = slice(head * group, (head + heads) * group)
        sums = keys.new_zeros((2, *keys.shape), dtype=reference.accumulate_dtype(k.dtype))
        for rows, seen in _query_chunks(call, q.shape[1], keys.shape[1]):
            dq[:, rows, at], *parts = call.backward(
                dout[:, rows, at],
                q[:, rows, at],
                keys[:, :seen],
                values[:, :seen],
                out[:, rows, at],
                lse[:, at, rows],
                None if dlse is None else dlse[:, at, rows],
                call.causal,
            )
            for total, part in zip(sums, parts, strict=True):
                total[:, :seen].add_(part)
        by_owner = torch.stack(
            [layout.in_rank_order(total, call.comm.size, call.order) for total in sums], 1
        )
        if returning is not None:
            sums_of_owner.append(_sum_of_ranks(returning))
        returning = call.comm.exchange(by_owner)
    sums_of_owner.append(_sum_of_ranks(returning))
    dk, dv = (torch.cat([sums[i] for sums in sums_of_owner], 2) for i in (0, 1))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _sum_of_ranks(returning: Arrival) -> Tensor:
    """What the ranks sent, (ranks, 2, b, local, heads, d), in one fixed order: the same at every run."""
    (parts,) = returning.wait()
    return parts.sum(0)
