"""All-gather attention: every rank gathers the keys and values of a few heads at a time.

As in the training of Llama 3 (Grattafiori et al., 2024, section 3.3.2). The next heads are gathered while the kernels
work on these, and the gradients of these are returned to their owners while the kernels work on the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flash3 import reference
from flash3.distributed import layout
from flash3.distributed.call import Call, DistributedAttention, checked, checked_packed
from flash3.distributed.chunks import DenseChunks, PackedChunks
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
    three times (as they arrive, as they came, and in order).

    Args:
        heads_per_step: key/value heads that are gathered at once, a divisor of heads_kv. None chooses a quarter of
            them, or the next divisor above.
    """
    comm = communicator(group)
    call = checked(comm, q, k, v, softmax_scale, causal, deterministic, order)
    heads = _heads_at_once(heads_per_step, k.shape[2])
    out, lse = DistributedAttention.apply(q, k, v, _AllGather(call, DenseChunks(call), heads))
    return (out, lse) if return_lse else out


def allgather_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    group=None,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    heads_per_step: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    order: str = "zigzag",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`allgather_attn_func` for packed documents, one after the other, cut for the ranks wherever it falls.

    Each document attends to itself alone, as in ``flash3.flash_attn_varlen_func``; a document may lie on several ranks.
    The host never waits for the device.

    Args:
        q: (tokens_local, heads_q, head_dim), this rank's part of all documents' tokens.
        k, v: (tokens_local, heads_kv, head_dim), the same positions.
        cu_seqlens: (documents + 1) int32, contiguous, on q's device, the same on all ranks: 0, then where each document
            ends, counted in the whole packing of ranks * tokens_local tokens. Tokens behind the last end belong to no
            document: out = 0, lse = -inf, zero gradients.
        order: where the shards lie in the packing; unlike without documents it matters with any mask.
        group, softmax_scale, causal, heads_per_step, deterministic, return_lse: as in :func:`allgather_attn_func`.

    Returns:
        out: (tokens_local, heads_q, head_dim), q's dtype.
        lse: (heads_q, tokens_local), if asked for: float32 (float64 for float64 inputs), differentiable.

    Raises:
        As :func:`allgather_attn_func`.
    """
    comm = communicator(group)
    call = checked_packed(comm, q, k, v, cu_seqlens, softmax_scale, causal, deterministic, order)
    heads = _heads_at_once(heads_per_step, k.shape[1])
    method = _AllGather(call, PackedChunks(call, cu_seqlens, q.shape[0]), heads)
    out, lse = DistributedAttention.apply(*(x.unsqueeze(0) for x in (q, k, v)), method)
    return (out.squeeze(0), lse.squeeze(0)) if return_lse else out.squeeze(0)


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


@dataclass(frozen=True)
class _AllGather:
    call: Call
    chunks: DenseChunks | PackedChunks
    heads: int  # key/value heads at a time

    def forward(self, q, k, v):
        return _forward(q, k, v, self.call, self.chunks, self.heads)

    def backward(self, *tensors):
        return _backward(*tensors, self.call, self.chunks, self.heads)


def _gathered(k: Tensor, v: Tensor, call: Call, heads: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first head, keys, values) of the whole sequence for ``heads`` heads at a time, the next on their way."""

    def gather(head: int) -> list[Arrival]:
        return [call.comm.gather(x[:, :, head : head + heads]) for x in (k, v)]

    arriving = gather(0)
    for head in range(0, k.shape[2], heads):
        shards = [arrival.wait()[0] for arrival in arriving]  # (ranks, b, local, heads, d) each
        if head + heads < k.shape[2]:
            arriving = gather(head + heads)
        yield head, *(layout.in_sequence_order(x, call.order) for x in shards)


def _forward(q, k, v, call: Call, chunks, heads: int) -> tuple[Tensor, Tensor]:
    batch, seqlen, heads_q, _ = q.shape
    group = heads_q // k.shape[2]
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((batch, heads_q, seqlen), dtype=reference.accumulate_dtype(q.dtype))
    for head, keys, values in _gathered(k, v, call, heads):
        at = slice(head * group, (head + heads) * group)
        for chunk in chunks.of(seqlen, keys.shape[1]):
            rows = chunk.rows
            out[:, rows, at], lse[:, at, rows] = chunks.forward(chunk, q[:, rows, at], keys, values)
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
    chunks: DenseChunks | PackedChunks,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    dq = q.new_empty(q.shape)
    returning: list[Arrival] = []
    sums_of_owner: list[list[Tensor]] = []  # of dk and dv, (b, local, heads, d), for each step
    for head, keys, values in _gathered(k, v, call, heads):
        at = slice(head * group, (head + heads) * group)
        dtype = reference.accumulate_dtype(k.dtype)
        sums = [x.new_zeros(x.shape, dtype=dtype) for x in (keys, values)]
        for chunk in chunks.of(q.shape[1], keys.shape[1]):
            rows = chunk.rows
            of_queries = [x[:, rows, at] for x in (dout, q, out)]
            of_rows = [None if x is None else x[:, at, rows] for x in (lse, dlse)]
            dq[:, rows, at], *parts = chunks.backward(chunk, of_queries, of_rows, keys, values)
            for total, part in zip(sums, parts, strict=True):
                total[:, : part.shape[1]].add_(part)
        if returning:
            sums_of_owner.append([_sum_of_ranks(arrival) for arrival in returning])
        by_owner = [layout.in_rank_order(x, call.comm.size, call.order) for x in sums]
        returning = [call.comm.exchange(x) for x in by_owner]
    sums_of_owner.append([_sum_of_ranks(arrival) for arrival in returning])
    dk, dv = (torch.cat([sums[i] for sums in sums_of_owner], 2) for i in (0, 1))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _sum_of_ranks(returning: Arrival) -> Tensor:
    """What the ranks sent, (ranks, b, local, heads, d), added up in one fixed order: the same at every run."""
    (parts,) = returning.wait()
    return parts.sum(0)
