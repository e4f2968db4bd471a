"""How time is taken: warm-up by time, several calls per sample, implementations interleaved."""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass
class Contender:
    """Something to time: `call` launches one piece of work, `context` surrounds a whole sample."""

    name: str
    call: Callable[[], object]
    context: Callable[[], AbstractContextManager] = nullcontext


@dataclass
class Samples:
    """Milliseconds per call, one value per round."""

    milliseconds: list[float]
    calls_per_sample: int

    def as_dict(self) -> dict:
        q1, median, q3 = quartiles(self.milliseconds)
        return {
            "ms_median": median,
            "ms_q1": q1,
            "ms_q3": q3,
            "samples": len(self.milliseconds),
            "calls_per_sample": self.calls_per_sample,
        }


def quartiles(values) -> tuple[float, float, float]:
    """First quartile, median and third quartile, by linear interpolation."""
    if len(values) == 1:
        return (values[0],) * 3
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, median, q3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed_ms(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Milliseconds per call over `calls` calls back to back: CUDA events, or the host's clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) * 1e3 / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # One call before the clock starts keeps the GPU busy while the host queues the rest, so the
    # sample holds no launch latency, and puts the caches in this implementation's own state.
    call()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def warm_up(
    contender: Contender, device: torch.device, seconds: float, sample_ms: float, max_calls=1000
) -> int:
    """Runs the contender for `seconds`; returns how many calls make a sample of `sample_ms`."""
    with contender.context():
        contender.call()  # compiles, builds plans, fills the allocator: not representative
        synchronize(device)
        deadline = time.perf_counter() + seconds
        per_call = elapsed_ms(contender.call, 1, device)
        while time.perf_counter() < deadline:
            calls = max(1, min(max_calls, int(sample_ms / max(per_call, 1e-6))))
            per_call = elapsed_ms(contender.call, calls, device)
    return max(1, min(max_calls, round(sample_ms / max(per_call, 1e-6) + 0.5)))


def interleave(
    contenders: list[Contender], calls: dict[str, int], rounds: int, device: torch.device
) -> dict[str, Samples]:
    """`rounds` samples of each contender in turn, each round starting with another one, so that
    a drift of clock or temperature meets all of them alike."""
    samples = {contender.name: Samples([], calls[contender.name]) for contender in contenders}
    for turn in range(rounds):
        first = turn % len(contenders) if contenders else 0
        for contender in contenders[first:] + contenders[:first]:
            with contender.context():
                milliseconds = elapsed_ms(contender.call, calls[contender.name], device)
            samples[contender.name].milliseconds.append(milliseconds)
    return samples


def matmul_ceiling(
    dtype: torch.dtype,
    device: torch.device,
    size: int,
    warmup_s: float,
    sample_ms: float,
    rounds: int,
) -> float:
    """TFLOP/s of a size^3 torch.mm on N(0, 1) inputs: what this chip gives a plain GEMM.

    Warmed up and sampled like a cell of the grid: a GEMM that runs for seconds can meet the power limit and read lower.
    """
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    contender = Contender("mm", lambda: torch.mm(a, b))
    calls = warm_up(contender, device, warmup_s, sample_ms)
    milliseconds = interleave([contender], {"mm": calls}, rounds, device)["mm"].milliseconds
    return 2 * size**3 / statistics.median(milliseconds) * 1e-9
