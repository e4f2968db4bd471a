"""Call overhead: host microseconds per call, on a shape whose GPU work is shorter than that."""

import gc
import time
from collections.abc import Callable
from functools import partial

import torch

from .baselines import Implementation
from .problem import backward_call, forward_call, make_values, to_layout
from .runner import record_error
from .shapes import Cell
from .timing import quartiles, synchronize

# Calls per sample. CUDA: less than the launch queue holds, so that the host never waits for the
# GPU. CPU: the call is the work itself, so few will do.
CALLS = {"cuda": 200, "cpu": 5}
WHAT = {
    "forward": "forward, no gradient",
    "recording": "forward, recording the graph",
    "backward": "backward",
}


def overhead_cell(dtype: str, head_dim: int) -> Cell:
    return Cell("fwd", dtype, head_dim, causal=True, seqlen=128, batch=1, heads=8, heads_kv=8)


def make_calls(cell: Cell, implementation: Implementation, values: dict) -> dict[str, Callable]:
    leaves = [to_layout(values[x], implementation.layout).detach().clone() for x in "qkv"]
    for leaf in leaves:
        leaf.requires_grad_()
    return {
        "forward": forward_call(cell, implementation, values),
        "recording": partial(implementation.forward, *leaves, cell.causal),
        "backward": backward_call(cell, implementation, values),
    }


def host_microseconds(call: Callable, implementation: Implementation, device, calls: int) -> float:
    """Microseconds the host spends per call; the GPU's work is waited for outside the clock."""
    with implementation.context():
        call()
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        microseconds = (time.perf_counter() - start) * 1e6 / calls
        synchronize(device)
    return microseconds


def measure_overhead(
    implementations: list[Implementation],
    dtype: str,
    head_dim: int,
    device: torch.device,
    rounds: int,
) -> dict:
    """{"cell", "results": {name: {"forward": {us_median, us_q1, us_q3}, ...} | {"error"}}}.

    The implementations take turns in each of `rounds` rounds, with the garbage collector off.
    """
    cell = overhead_cell(dtype, head_dim)
    calls = CALLS[device.type]
    values = make_values(cell, device, seed=0)
    results: dict[str, dict] = {}
    ready = []
    for implementation in implementations:
        try:
            made = make_calls(cell, implementation, values)
            for call in made.values():
                host_microseconds(call, implementation, device, calls)
            ready.append((implementation, made))
        except Exception as error:
            record_error(error, results, implementation.name, device)
    samples = {item.name: {what: [] for what in WHAT} for item, _ in ready}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for implementation, made in ready:
                for what, call in made.items():
                    spent = host_microseconds(call, implementation, device, calls)
                    samples[implementation.name][what].append(spent)
    finally:
        gc.enable()
    for name, by_kind in samples.items():
        results[name] = {
            what: dict(zip(("us_q1", "us_median", "us_q3"), quartiles(values), strict=True))
            for what, values in by_kind.items()
        }
    return {"cell": cell.as_dict(), "calls_per_sample": calls, "results": results}
