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


def make_call(what: str, cell: Cell, implementation: Implementation, values: dict) -> Callable:
    """One of WHAT."""
    if what == "forward":
        return forward_call(cell, implementation, values)
    if what == "backward":
        return backward_call(cell, implementation, values)
    leaves = [to_layout(values[x], implementation.layout).detach().clone() for x in "qkv"]
    for leaf in leaves:
        leaf.requires_grad_()
    return partial(implementation.forward, *leaves, cell.causal)


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
    """{"cell", "results": {name: {"forward": {us_median, us_q1, us_q3}, ..., "error"}}}; "error" only where one of WHAT
    raised, which then lacks.

    The implementations take turns in each of `rounds` rounds, with the garbage collector off.
    """
    cell = overhead_cell(dtype, head_dim)
    calls = CALLS[device.type]
    values = make_values(cell, device, seed=0)
    results: dict[str, dict] = {}
    ready = []
    for implementation in implementations:
        made = {}
        for what in WHAT:
            try:
                call = make_call(what, cell, implementation, values)
                host_microseconds(call, implementation, device, calls)
                made[what] = call
            except Exception as error:
                record_error(error, results, implementation.name, device)
        ready.append((implementation, made))
    samples = {item.name: {what: [] for what in made} for item, made in ready}
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
        results[name] = results.get(name, {}) | {
            what: dict(zip(("us_q1", "us_median", "us_q3"), quartiles(values), strict=True))
            for what, values in by_kind.items()
        }
    return {"cell": cell.as_dict(), "calls_per_sample": calls, "results": results}
