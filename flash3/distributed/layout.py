"""Which part of a sequence lies on which rank.

A sequence is cut into chunks of equal length and every rank holds some of them, one after the other:

- ``zigzag``: 2n chunks for n ranks, rank r holds chunks r and 2n - 1 - r. Under a causal mask early queries see few
  keys and late ones many; with one of each, every rank has the same work.
- ``contiguous``: n chunks, rank r holds chunk r.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

ORDERS = ("zigzag", "contiguous")


def check_order(order: str) -> None:
    if order not in ORDERS:
        raise ValueError(f"order: must be one of {', '.join(ORDERS)}, got {order!r}")


def chunks_of(rank: int, size: int, order: str) -> tuple[int, ...]:
    """The chunks that ``rank`` of ``size`` ranks holds, in the order in which it holds them."""
    return (rank, 2 * size - 1 - rank) if order == "zigzag" else (rank,)


def chunks_of_all(size: int, order: str) -> list[int]:
    """The chunks in the order in which they come when the shards of rank 0, 1, ... are put together."""
    return [chunk for rank in range(size) for chunk in chunks_of(rank, size, order)]


def shard(x: Tensor, rank: int, size: int, dim: int, order: str) -> Tensor:
    """The part of the whole sequence ``x`` that ``rank`` holds, contiguous."""
    count = len(chunks_of_all(size, order))
    length = x.shape[dim]
    if length % count != 0:
        raise ValueError(
            f"x: the length of dimension {dim} must be a multiple of {count} for {size} ranks in {order} order, got "
            f"{length}; pad the sequence"
        )
    chunks = x.chunk(count, dim) if length else [x] * count
    return torch.cat([chunks[chunk] for chunk in chunks_of(rank, size, order)], dim)


def in_sequence_order(shards: Tensor, order: str) -> Tensor:
    """(ranks, batch, local length, ...) as a gather returns it -> (batch, whole length, ...) in sequence order."""
    size, batch, local = shards.shape[:3]
    held = chunks_of_all(size, order)
    per_rank = len(held) // size
    chunks = shards.unflatten(2, (per_rank, local // per_rank)).transpose(1, 2).flatten(0, 1)
    if held != sorted(held):
        where = sorted(range(len(held)), key=held.__getitem__)
        chunks = chunks[torch.tensor(where, device=shards.device)]
    return chunks.transpose(0, 1).reshape(batch, size * local, *shards.shape[3:])


def in_rank_order(whole: Tensor, size: int, order: str) -> Tensor:
    """The inverse of :func:`in_sequence_order`, contiguous."""
    held = chunks_of_all(size, order)
    chunks = whole.unflatten(1, (len(held), whole.shape[1] // len(held)))
    if held != sorted(held):
        chunks = chunks[:, torch.tensor(held, device=whole.device)]
    by_rank = chunks.unflatten(1, (size, len(held) // size)).flatten(2, 3)
    return by_rank.transpose(0, 1).contiguous()


def positions(rank: int, size: int, local: int, order: str, device=None) -> Tensor:
    """Position in the whole sequence of each of the ``local`` elements that ``rank`` holds, int64."""
    held = chunks_of(rank, size, order)
    check_even(local, order, "seqlen_local")
    length = local // len(held)
    steps = torch.arange(length, device=device)
    return torch.cat([chunk * length + steps for chunk in held])


def check_even(local: int, order: str, name: str) -> None:
    if order == "zigzag" and local % 2 != 0:
        raise ValueError(
            f"{name}: the length of a shard in zigzag order must be even (two chunks of equal length), got {local}"
        )


class Half(enum.Enum):
    """A part of a shard in zigzag order."""

    ALL = enum.auto()
    FIRST = enum.auto()
    SECOND = enum.auto()

    def of(self, x: Tensor, dim: int = 1) -> Tensor:
        """That part of a shard ``x``, a view."""
        if self is Half.ALL:
            return x
        half = x.shape[dim] // 2
        return x.narrow(dim, 0 if self is Half.FIRST else half, half)


@dataclass(frozen=True)
class Block:
    """What a rank computes of the attention of its queries to the keys of one rank."""

    queries: Half
    keys: Half
    causal: bool


def block(rank: int, source: int, causal: bool, order: str) -> Block | None:
    """Which of the queries of ``rank`` see which of the keys that rank ``source`` holds; None if none do.

    In zigzag order all queries of a rank come after the first chunk of every earlier rank and before the second, and
    its second chunk after both chunks of every later rank: half of the scores, and no mask within them.
    """
    if not causal or rank == source:
        return Block(Half.ALL, Half.ALL, causal)
    if order == "contiguous":
        return Block(Half.ALL, Half.ALL, False) if source < rank else None
    if source < rank:
        return Block(Half.ALL, Half.FIRST, False)
    return Block(Half.SECOND, Half.ALL, False)
