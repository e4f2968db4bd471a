"""Ranks for tests: threads of one process that share a device, or processes over gloo or NCCL."""

from __future__ import annotations

import datetime
import pickle
import queue
import socket
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flash3.distributed.communicator import Communicator


class _Letter:
    """An exchange between threads: ``wait`` blocks until the other ranks have sent."""

    def __init__(self, receive: Callable[[], tuple]):
        self._receive = receive

    def wait(self) -> tuple:
        return self._receive()


class ThreadCommunicator(Communicator):
    """The exchanges of Communicator between threads: the same calls in the same order, no process group."""

    def __init__(self, rank: int, size: int, boxes: Mailboxes):
        self.rank, self.size = rank, size
        self._boxes, self._calls = boxes, 0

    def _post(self, letters: dict[int, tuple]) -> int:
        self._calls += 1
        for receiver, tensors in letters.items():
            self._boxes.put((self.rank, receiver, self._calls), tuple(x.clone() for x in tensors))
        return self._calls

    def rotate(self, tensors):
        call = self._post({(self.rank + 1) % self.size: tuple(tensors)})
        previous = (self.rank - 1) % self.size
        return _Letter(lambda: self._boxes.get((previous, self.rank, call)))

    def _from_all(self, call: int) -> tuple:
        parts = [self._boxes.get((sender, self.rank, call))[0] for sender in range(self.size)]
        return (torch.stack(parts),)

    def gather(self, x):
        call = self._post(dict.fromkeys(range(self.size), (x,)))
        return _Letter(lambda: self._from_all(call))

    def exchange(self, x):
        call = self._post({receiver: (x[receiver],) for receiver in range(self.size)})
        return _Letter(lambda: self._from_all(call))

    def check_same(self, what, device):
        (everyone,) = self.gather(torch.tensor(tuple(what.values()))).wait()
        assert (everyone == everyone[0]).all(), everyone


class Mailboxes:
    """Letters by (sender, receiver, number of the call)."""

    def __init__(self):
        self._boxes: dict = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()

    def _box(self, address) -> queue.SimpleQueue:
        with self._lock:
            return self._boxes[address]

    def put(self, address, letter) -> None:
        self._box(address).put(letter)

    def get(self, address, seconds: float = 60):
        return self._box(address).get(timeout=seconds)


def run_threads(size: int, function: Callable[[ThreadCommunicator], object]) -> list:
    """``function`` on ``size`` ranks that are threads of this process; their results in the order of the ranks."""
    boxes = Mailboxes()

    def one(rank: int):
        # A GPU has one thread for the backward of everybody: a rank that waits in it for another would wait for ever.
        with torch.autograd.set_multithreading_enabled(False):
            return function(ThreadCommunicator(rank, size, boxes))

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(one, rank) for rank in range(size)]]


def run_processes(
    size: int,
    function: Callable[[int, int], object],
    *,
    backend: str = "gloo",
    group_timeout: float = 60,
    seconds: float = 300,
) -> list:
    """``function(rank, size)`` in ``size`` new processes that form the default group.

    Returns what each returned, or the text of its exception. ``function`` and its result must be picklable.
    """
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    arguments = (size, _free_port(), backend, group_timeout, function, results)
    processes = [
        context.Process(target=_rank_main, args=(rank, *arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = threading.Timer(seconds, lambda: [p.kill() for p in processes])
    deadline.start()
    found = {}
    try:
        while len(found) < size and (any(p.is_alive() for p in processes) or not results.empty()):
            if results.empty():
                processes[0].join(0.05)
                continue
            rank, outcome = results.get()
            found[rank] = pickle.loads(outcome)
    finally:
        deadline.cancel()
        for process in processes:
            process.join(10)
            process.kill()
    return [found.get(rank, f"rank {rank} ended without a result") for rank in range(size)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_main(rank, size, port, backend, group_timeout, function, results) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=group_timeout),
        )
        outcome = function(rank, size)
    except Exception:
        outcome = traceback.format_exc()
    # As bytes: a tensor in the queue would be fetched from this process, which ends.
    results.put((rank, pickle.dumps(outcome)))
    if dist.is_initialized() and not isinstance(outcome, str):
        dist.destroy_process_group()
