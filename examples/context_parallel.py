"""What train_gpt.py needs where several processes divide each sequence.

Every rank draws the whole batch, as one process does, and keeps its shard of it. Attention is the
only layer that sees other tokens; flash3.distributed computes it over all ranks. The shards have
equal lengths, so the mean of the ranks' mean losses is the loss of the whole, and the mean of their
gradients, which DistributedDataParallel forms, is its gradient.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from flash3 import distributed

FUNCTIONS = {
    "ring": distributed.ring_attn_func,
    "allgather": distributed.allgather_attn_func,
    "ulysses": distributed.ulysses_attn_func,
}


class Ranks:
    """One process, which has each sequence whole."""

    first = True

    def attention(self, alone: Callable) -> Callable:
        """The model's attention, given the one of a single process."""
        return alone

    def shard(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's part of (b, s)."""
        return tokens

    def positions(self, shard: torch.Tensor) -> torch.Tensor | None:
        """Where a shard's tokens lie in the sequence; None if it is all of it."""

    def averaging(self, model: nn.Module) -> nn.Module:
        """The model with gradients that are the mean over the ranks."""
        return model

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of the ranks' tensors."""
        return x


class ContextParallel(Ranks):
    """The default process group, whose ranks hold a part of each sequence."""

    def __init__(self, how: str) -> None:
        self.first = dist.get_rank() == 0
        self.how = how

    def attention(self, alone: Callable) -> Callable:
        function = FUNCTIONS[self.how]
        return lambda q, k, v: function(q, k, v, causal=True)

    def shard(self, tokens: torch.Tensor) -> torch.Tensor:
        return distributed.shard_sequence(tokens)

    def positions(self, shard: torch.Tensor) -> torch.Tensor:
        return distributed.position_ids(shard.shape[1], device=shard.device)

    def averaging(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


ALONE = Ranks()


def fault(settings, asked_attention: str | None) -> str | None:
    """What is wrong with the command line's settings in this process, if anything is."""
    size, started = settings.context_parallel, int(os.environ.get("WORLD_SIZE", "1"))
    if size < 1 or size != started:
        return (
            f"--context-parallel must be the number of processes, {started}, got {size}; "
            "torchrun --nproc-per-node N starts N"
        )
    if size == 1:
        return asked_attention and "--context-parallel-attention needs --context-parallel"
    if settings.context % (2 * size):
        return (
            f"--context must be a multiple of {2 * size}, two chunks for each of {size} ranks, "
            f"got {settings.context}"
        )
    if settings.attention != "flash3":
        return f"--context-parallel is for --attention flash3, got {settings.attention}"
    if settings.pack or settings.window is not None:
        return "--context-parallel does without --pack and --window"
    if settings.device not in ("cuda", "cpu"):
        return f"--device must be cuda, a GPU for each rank, or cpu, got {settings.device}"
    return None


@contextmanager
def joined(settings) -> Iterator[Ranks]:
    """The ranks that torchrun started, in a process group; ALONE without --context-parallel.

    An error leaves the group as it is: closing it would wait for the others.
    """
    if settings.context_parallel == 1:
        yield ALONE
        return
    if settings.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # from here on "cuda" is this one
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    yield ContextParallel(settings.context_parallel_attention)
    dist.destroy_process_group()
