"""What the distributed functions ask of ``torch.distributed``: four exchanges between the ranks of one group.

Each starts at once, runs beside the kernels that are launched after it, and is finished by ``wait()`` on what it
returns. NCCL waits on the device, so the CPU never does; gloo waits on the CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flash3 import checks

# torch 2.13 gave it a new name and deprecated the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Arrival:
    """Tensors that are on their way. They may be used after ``wait()``, which returns them."""

    def __init__(self, works: Sequence, tensors: tuple[Tensor, ...], sent: tuple[Tensor, ...]):
        self._works, self._tensors = works, tensors
        self._sent = sent  # must outlive the exchange

    def wait(self) -> tuple[Tensor, ...]:
        for work in self._works:
            work.wait()
        self._works, self._sent = (), ()
        return self._tensors


class Communicator:
    """The ranks of one process group. All exchanges are collective: every rank makes the same calls in one order."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def rotate(self, tensors: Sequence[Tensor]) -> Arrival:
        """Sends ``tensors`` to the next rank of the ring and receives the previous rank's, of the same shapes."""
        sent = tuple(x.contiguous() for x in tensors)
        received = tuple(torch.empty_like(x) for x in sent)
        following, previous = (
            dist.get_global_rank(self._group, (self.rank + step) % self.size) for step in (1, -1)
        )
        sends = [dist.P2POp(dist.isend, x, following, self._group) for x in sent]
        receives = [dist.P2POp(dist.irecv, x, previous, self._group) for x in received]
        # Every second rank receives first: a backend that runs the operations one by one cannot lock up.
        operations = sends + receives if self.rank % 2 == 0 else receives + sends
        works = dist.batch_isend_irecv(operations)
        _head_start(sent[0])
        return Arrival(works, received, sent)

    def gather(self, x: Tensor) -> Arrival:
        """Every rank's ``x``: one tensor (size, *x.shape)."""
        x = x.contiguous()
        gathered = x.new_empty((self.size, *x.shape))
        work = _all_gather(gathered.view(-1), x.view(-1), self._group, async_op=True)
        _head_start(x)
        return Arrival([work], (gathered,), (x,))

    def exchange(self, x: Tensor) -> Arrival:
        """Sends ``x[r]`` to rank r: one tensor (size, ...) whose element r is what rank r sent here."""
        x = x.contiguous()
        received = torch.empty_like(x)
        work = dist.all_to_all_single(received, x, group=self._group, async_op=True)
        return Arrival([work], (received,), (x,))

    def check_same(self, what: dict[str, int], device: torch.device) -> None:
        """Raises ValueError on every rank if the ranks' numbers differ.

        It costs a collective and waits for its result, so with NCCL it is done for numbers that this rank has not
        passed to the group before, or always with FLASH3_DEBUG=1 in the environment. Ranks that disagree later
        are stopped by the timeout of the group.
        """
        numbers = tuple(what.values())
        seen = _checked.setdefault(self._group, set())
        if numbers in seen and device.type != "cpu" and not checks.DEBUG:
            return
        mine = torch.tensor(numbers, dtype=torch.int64, device=device)
        (everyone,) = self.gather(mine).wait()
        everyone = everyone.tolist()
        for position, name in enumerate(what):
            values = [numbers_of_rank[position] for numbers_of_rank in everyone]
            if len(set(values)) > 1:
                listed = ", ".join(f"rank {r}: {value}" for r, value in enumerate(values))
                raise ValueError(f"{name}: must be the same on all ranks, got {listed}")
        seen.add(numbers)


# About 15 microseconds: longer than the exchange needs to start, short beside the kernels that it runs beside.
HEAD_START_CYCLES = 25_000


def _head_start(x: Tensor) -> None:
    """Lets an exchange begin before the attention kernel that is launched next.

    That kernel takes every SM until it ends. An exchange that becomes ready at the same moment, on its own stream,
    would often find none left on one of the ranks, and all of them would wait for it.
    """
    if x.is_cuda and HEAD_START_CYCLES:
        torch.cuda._sleep(HEAD_START_CYCLES)


_checked: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)


def communicator(group: dist.ProcessGroup | DeviceMesh | Communicator | None) -> Communicator:
    """The communicator of a process group, a mesh of one dimension, or of all processes for None."""
    if isinstance(group, Communicator):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: a DeviceMesh must have one dimension, got {group.ndim}; take one by its name, mesh['cp']"
            )
        return Communicator(group.get_group())
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "group: torch.distributed is not initialized; call torch.distributed.init_process_group first"
        )
    if group is None:
        return Communicator(dist.group.WORLD)
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns to the others
        raise ValueError("group: this process is not a member of it")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}"
        )
    return Communicator(group)
