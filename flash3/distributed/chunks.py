"""What a rank computes with all keys at hand: its queries chunk by chunk, each chunk a run of positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flash3 import ops
from flash3.distributed import layout
from flash3.distributed.call import Call


@dataclass(frozen=True)
class Chunk:
    rows: slice  # of the shard
    begin: int  # position in the whole sequence of the first of them
    end: int


def _held(call: Call, seqlen_local: int) -> list[Chunk]:
    held = layout.chunks_of(call.comm.rank, call.comm.size, call.order)
    length = seqlen_local // len(held)
    return [
        Chunk(slice(i * length, (i + 1) * length), chunk * length, (chunk + 1) * length)
        for i, chunk in enumerate(held)
    ]


class DenseChunks:
    """One sequence in each batch entry. Tensors (b, s, h, d); keys and values of the whole sequence."""

    def __init__(self, call: Call):
        self._call = call

    def of(self, seqlen_local: int, seqlen_k: int) -> list[Chunk]:
        if self._call.causal:
            return _held(self._call, seqlen_local)
        return [Chunk(slice(0, seqlen_local), 0, seqlen_k)]  # no mask: all at once

    def forward(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self._call.forward(q, k[:, : chunk.end], v[:, : chunk.end], self._call.causal)

    def backward(self, chunk: Chunk, of_queries, of_rows, k: Tensor, v: Tensor):
        dout, q, out = of_queries
        seen = (x[:, : chunk.end] for x in (k, v))
        return self._call.backward(dout, q, *seen, out, *of_rows, self._call.causal)


class PackedChunks:
    """Documents one after the other, in a batch of one. A chunk may begin and end within a document."""

    def __init__(self, call: Call, cu_seqlens: Tensor, seqlen_local: int):
        self._call = call
        self._cu_seqlens = cu_seqlens
        self._sequences = {
            chunk.begin: self._sequences_of(chunk) for chunk in _held(call, seqlen_local)
        }

    def _sequences_of(self, chunk: Chunk) -> tuple[Tensor | None, ...]:
        """Where each document's queries of the chunk lie within it, and its keys in the packing.

        Under a causal mask a document's keys end with its last query here: the mask, aligned at the end, is then that
        of the whole document.
        """
        ends = self._cu_seqlens
        cu_q = ends.clamp(chunk.begin, chunk.end) - chunk.begin
        used_k = None
        if self._call.causal:
            used_k = (ends[1:].clamp(max=chunk.end) - ends[:-1]).clamp(min=0)
        return cu_q, ends, None, used_k

    def of(self, seqlen_local: int, seqlen_k: int) -> list[Chunk]:
        return _held(self._call, seqlen_local)

    def forward(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        call = self._call
        tensors = (x.squeeze(0) for x in (q, k, v))
        out, lse = ops.varlen_fwd(
            *tensors, *self._sequences[chunk.begin], call.softmax_scale, call.causal
        )
        return out.unsqueeze(0), lse.unsqueeze(0)

    def backward(self, chunk: Chunk, of_queries, of_rows, k: Tensor, v: Tensor):
        call = self._call
        dout, q, out = (x.squeeze(0) for x in of_queries)
        lse, dlse = (None if x is None else x.squeeze(0) for x in of_rows)
        tensors = (dout, q, k.squeeze(0), v.squeeze(0), out, lse, dlse)
        grads = ops.varlen_bwd(
            *tensors,
            *self._sequences[chunk.begin],
            call.softmax_scale,
            call.causal,
            call.deterministic,
        )
        return tuple(x.unsqueeze(0) for x in grads)
