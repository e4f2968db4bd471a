"""Attention over sequences that are longer than one GPU: each rank of a process group holds a part.

Three ways, all exact, forward and backward, on torch.distributed (NCCL on GPUs, gloo on CPUs):

- :func:`ring_attn_func`: keys and values travel around the ring of ranks. Least memory, any number of heads.
- :func:`allgather_attn_func`: keys and values of a few heads at a time are gathered. Fewer and larger kernels.
- :func:`ulysses_attn_func`: heads are exchanged for positions. The number of ranks must divide the heads.

:func:`allgather_attn_varlen_func` and :func:`ulysses_attn_varlen_func` do the same for packed documents.

:func:`shard_sequence`, :func:`unshard_sequence` and :func:`position_ids` say which rank holds what. How it works and
what it costs is in docs/distributed.md.
"""

from flash3.distributed.allgather import allgather_attn_func, allgather_attn_varlen_func
from flash3.distributed.ring import ring_attn_func
from flash3.distributed.sharding import position_ids, shard_sequence, unshard_sequence
from flash3.distributed.ulysses import ulysses_attn_func, ulysses_attn_varlen_func

__all__ = [
    "allgather_attn_func",
    "allgather_attn_varlen_func",
    "position_ids",
    "ring_attn_func",
    "shard_sequence",
    "ulysses_attn_func",
    "ulysses_attn_varlen_func",
    "unshard_sequence",
]
