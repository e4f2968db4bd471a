"""Cutting a sequence for the ranks of a group and putting it together again."""

from __future__ import annotations

import torch
from torch import Tensor

from flash3.distributed import layout
from flash3.distributed.communicator import communicator


def shard_sequence(x: Tensor, group=None, dim: int = 1, *, order: str = "zigzag") -> Tensor:
    """This rank's part of a sequence that every rank has whole; differentiable.

    Args:
        x: any shape; ``dim`` is the sequence. Its length must be a multiple of the number of ranks, or of twice that in
            zigzag order.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.
        dim: the dimension of the sequence.
        order: "zigzag": of 2n chunks rank r of n gets chunks r and 2n - 1 - r, so that under a causal mask all ranks
            have equal work; "contiguous": of n chunks rank r gets chunk r.

    Returns:
        The rank's chunks one after the other, contiguous, of x's dtype and device.

    Raises:
        ValueError: a length that does not divide, or an order that does not exist.
    """
    comm = communicator(group)
    layout.check_order(order)
    return layout.shard(x, comm.rank, comm.size, dim, order)


def unshard_sequence(x: Tensor, group=None, dim: int = 1, *, order: str = "zigzag") -> Tensor:
    """The whole sequence of which every rank has a part: the inverse of :func:`shard_sequence`, on every rank.

    It is for looking at results and has no gradient: x must not require one (detach it).

    Args:
        x: this rank's part, the same shape on all ranks; ``dim`` is the sequence.
        group, dim, order: as in :func:`shard_sequence`.

    Raises:
        NotImplementedError: x requires a gradient.
        ValueError: parts of different lengths, or an order that does not exist.
    """
    comm = communicator(group)
    layout.check_order(order)
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("x: unshard_sequence has no gradient; pass x.detach()")
    layout.check_even(x.shape[dim], order, "x")
    comm.check_same({f"x: length of dimension {dim}": x.shape[dim]}, x.device)
    sequence_first = x.movedim(dim, 0).unsqueeze(0)  # (1, local, ...)
    (shards,) = comm.gather(sequence_first).wait()
    return layout.in_sequence_order(shards, order).squeeze(0).movedim(0, dim)


def position_ids(
    seqlen_local: int, group=None, *, order: str = "zigzag", device: torch.device | None = None
) -> Tensor:
    """Positions in the whole sequence of the tokens that this rank holds, (seqlen_local,) int64: for rotary embeddings.

    Raises:
        ValueError: an odd seqlen_local in zigzag order, or an order that does not exist.
    """
    comm = communicator(group)
    layout.check_order(order)
    return layout.positions(comm.rank, comm.size, seqlen_local, order, device)
