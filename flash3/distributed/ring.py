"""Ring attention: keys and values travel, queries stay.

Liu et al., Ring Attention with Blockwise Transformers (2023), with the exact merge of partial results by their
log-sum-exp, and under a causal mask the zigzag order of :mod:`flash3.distributed.layout`. At step j rank r computes
with the keys of rank r - j while it passes them on to rank r + 1. In the backward dk and dv travel with their keys,
one step behind, and end at home.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from flash3 import reference
from flash3.distributed import layout
from flash3.distributed.call import Call, DistributedAttention, checked
from flash3.distributed.communicator import communicator
from flash3.distributed.layout import Half
from flash3.distributed.partial import RunningOutput, RunningSum


def ring_attn_func(
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
    """Exact attention over a sequence whose parts lie on the ranks of ``group``; differentiable in q, k and v.

    Every rank calls it with its shard, and gets the shard of the result that belongs to its queries. Each sends its
    keys and values once around the ring, hidden behind the kernels if they take longer than the transfer.

    Args:
        q: (batch, seqlen_local, heads_q, head_dim), this rank's queries. dtypes, head_dim and devices as for
            ``flash3.flash_attn_func``.
        k, v: (batch, seqlen_local_k, heads_kv, head_dim), this rank's keys and values, v of a head_dim_v of its own;
            with ``causal`` the same positions as q. All ranks hold shards of one shape.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.
        softmax_scale: positive factor of the scores; None is head_dim ** -0.5.
        causal: a query sees the keys at its own position in the whole sequence and before.
        deterministic: bitwise equal gradients over repeated runs.
        return_lse: return (out, lse).
        order: where the shards lie in the sequence, "zigzag" (see :func:`flash3.distributed.shard_sequence`) or
            "contiguous", which under a causal mask leaves early ranks idle. Without a mask any order gives the same.

    Returns:
        out: (batch, seqlen_local, heads_q, head_dim_v), q's dtype.
        lse: (batch, heads_q, seqlen_local), if asked for: natural log, float32 (float64 for float64 inputs), over all
            keys of all ranks, differentiable.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``flash3.flash_attn_func``; ValueError too for shards that
            differ between ranks, where that is noticed (see docs/distributed.md).
        RuntimeError: torch.distributed is not initialized, or a rank of the group did not answer in time.
    """
    call = checked(communicator(group), q, k, v, softmax_scale, causal, deterministic, order)
    out, lse = DistributedAttention.apply(q, k, v, _Ring(call))
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Ring:
    call: Call

    def forward(self, q, k, v):
        return _forward(q, k, v, self.call)

    def backward(self, *tensors):
        return _backward(*tensors, self.call)


def _blocks(call: Call) -> list[layout.Block | None]:
    """What the rank computes with the keys of the others, in the order in which they come; None for nothing."""
    rank, size = call.comm.rank, call.comm.size
    sources = [(rank - step) % size for step in range(1, size)]
    return [layout.block(rank, source, call.causal, call.order) for source in sources]


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    blocks = _blocks(call)
    arriving = call.comm.rotate((k, v)) if blocks else None
    out, lse = call.forward(q, k, v, call.causal)
    rows = _by_rows(RunningOutput, blocks, out, lse)
    for position, block in enumerate(blocks):
        k, v = arriving.wait()
        if position + 1 < len(blocks):  # the last keys have been everywhere
            arriving = call.comm.rotate((k, v))
        if block is None:
            continue
        part, part_lse = call.forward(
            block.queries.of(q), block.keys.of(k), block.keys.of(v), block.causal
        )
        _add_rows(rows, block.queries, part, part_lse)
    return out, lse


def _by_rows(running: type, blocks: list[layout.Block | None], *results: Tensor) -> dict:
    """A running result for each half of the rows, or one for all if they get the same number of parts."""
    queries = [block.queries for block in blocks if block is not None]
    if Half.SECOND not in queries:
        return {Half.ALL: running(*results, len(queries))}
    return {
        half: running(*_rows_of(half, results), sum(x in (half, Half.ALL) for x in queries))
        for half in (Half.FIRST, Half.SECOND)
    }


def _rows_of(half: Half, results: tuple[Tensor, ...]) -> list[Tensor]:
    """The rows of out or dq (b, s, h, d), and of lse (b, h, s)."""
    return [half.of(x, 1 if x.ndim == 4 else 2) for x in results]


def _add_rows(rows: dict, queries: Half, *parts: Tensor) -> None:
    if queries is Half.ALL and Half.ALL not in rows:
        for half, running in rows.items():
            running.add(*_rows_of(half, parts))
    else:
        rows[queries].add(*parts)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = _blocks(call)
    arriving = call.comm.rotate((k, v)) if blocks else None
    dq, *dkv = call.backward(dout, q, k, v, out, lse, dlse, call.causal)
    rows = _by_rows(RunningSum, blocks, dq)
    for position, block in enumerate(blocks):
        k, v = arriving.wait()
        last = position + 1 == len(blocks)
        if not last:
            arriving = call.comm.rotate((k, v))
        # The sums so far of the keys that the previous rank had: those that this rank has now. They travel while the
        # kernels of this step run.
        dkv_arriving = call.comm.rotate(dkv)
        parts = _block_backward(dout, q, k, v, out, lse, dlse, block, call)
        dkv = dkv_arriving.wait()
        if block is not None:
            _add_rows(rows, block.queries, parts[0])
            parts = parts[1:]
        dtype = q.dtype if last else reference.accumulate_dtype(q.dtype)
        dkv = [_plus(x, part, block, dtype) for x, part in zip_longest(dkv, parts)]
    if blocks:
        dkv = call.comm.rotate(dkv).wait()  # home
    return dq, *dkv


def _plus(total: Tensor, part: Tensor | None, block: layout.Block | None, dtype) -> Tensor:
    """The sum that travels on. 16 bits hold one part, or all of them, without loss: only in between is it float32."""
    if total.dtype != dtype and total.dtype != reference.accumulate_dtype(dtype):
        total = total.to(dtype)
    if block is not None:
        block.keys.of(total).add_(part)
    return total.to(dtype)


def _block_backward(dout, q, k, v, out, lse, dlse, block, call) -> tuple[Tensor, ...]:
    if block is None:
        return ()
    rows, keys = block.queries, block.keys
    return call.backward(
        rows.of(dout),
        rows.of(q),
        keys.of(k),
        keys.of(v),
        rows.of(out),
        rows.of(lse, 2),
        None if dlse is None else rows.of(dlse, 2),
        block.causal,
    )
