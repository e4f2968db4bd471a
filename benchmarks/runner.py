"""Runs cells: builds the calls, passes flash3 through the gate, measures memory and time."""

from dataclasses import dataclass

import torch

from . import gate
from .baselines import Implementation, reference_sdpa
from .problem import from_layout, make_call, make_values, rotating
from .shapes import Cell
from .timing import Contender, interleave, synchronize, warm_up


@dataclass(frozen=True)
class Settings:
    rounds: int = 7
    warmup_s: float = 0.1  # per implementation and cell
    sample_ms: float = 3.0
    rotate: int = 1  # sets of inputs gone through in turn
    seed: int = 0


class DeviceLost(RuntimeError):
    """A CUDA error left the context unusable: nothing after it can be measured."""


def describe(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def record_error(error: Exception, results: dict, name: str, device: torch.device) -> None:
    results[name] = {"error": describe(error)}
    try:
        synchronize(device)
    except RuntimeError as sticky:
        raise DeviceLost(f"{name}: {describe(sticky)}") from error


def run_once(call, implementation: Implementation) -> tuple[torch.Tensor, ...]:
    """The call's results in (batch, seqlen, heads, head_dim)."""
    with implementation.context():
        return tuple(from_layout(result, implementation.layout) for result in call())


def extra_bytes(cell: Cell, call, implementation: Implementation, device) -> int | None:
    """Peak bytes asked of the allocator by one call, beyond its results and the fp32 LSE."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    results = run_once(call, implementation)
    synchronize(device)
    peak = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
    lse = 4 * cell.batch * cell.heads * cell.seqlen if cell.mode == "fwd" else 0
    return max(0, peak - before - lse - sum(result.nbytes for result in results))


def gate_reference(cell: Cell, calls: dict, implementations: dict, values: dict):
    """(name, results) of the first baseline that computes this cell: torch's before packages,
    SDPA's unfused path when there is none."""
    for name, call in calls.items():
        if name != "flash3":
            return name, run_once(call, implementations[name])
    math = reference_sdpa()
    return math.name, run_once(make_call(cell, math, values), math)


def build_calls(cell: Cell, implementations: dict, inputs: list[dict], results: dict, device):
    """name -> call for those that can run the cell; the others' errors go into `results`."""
    calls = {}
    for name, implementation in implementations.items():
        try:
            call = rotating([make_call(cell, implementation, values) for values in inputs])
            for _ in inputs:  # once round: the gate starts again at the first inputs
                run_once(call, implementation)
            synchronize(device)
            calls[name] = call
        except Exception as error:
            record_error(error, results, name, device)
    return calls


def measure_cell(
    cell: Cell, implementations: list[Implementation], settings: Settings, device: torch.device
) -> dict:
    """The cell's entry of the result file. An implementation that raises has {"error": ...}.

    Raises DeviceLost when the GPU can't go on.
    """
    by_name = {implementation.name: implementation for implementation in implementations}
    results: dict[str, dict] = {}
    entry = {**cell.as_dict(), "gate": None, "results": results}
    inputs = [make_values(cell, device, settings.seed + i) for i in range(settings.rotate)]
    calls = build_calls(cell, by_name, inputs, results, device)
    if "flash3" in calls:
        try:
            name, reference = gate_reference(cell, calls, by_name, inputs[0])
            ours = run_once(calls["flash3"], by_name["flash3"])
            entry["gate"] = gate.check(cell.mode, ours, reference, name).as_dict()
            del ours, reference
        except Exception as error:
            record_error(error, results, "flash3", device)
            del calls["flash3"]
    extra = {name: extra_bytes(cell, call, by_name[name], device) for name, call in calls.items()}
    contenders = [Contender(name, call, by_name[name].context) for name, call in calls.items()]
    per_sample = {
        contender.name: warm_up(contender, device, settings.warmup_s, settings.sample_ms)
        for contender in contenders
    }
    for name, samples in interleave(contenders, per_sample, settings.rounds, device).items():
        timed = samples.as_dict()
        timed["tflops"] = cell.tflops(timed["ms_median"])
        timed["extra_bytes"] = extra[name]
        results[name] = timed
    entry["results"] = {name: results[name] for name in by_name if name in results}
    return entry
