"""What a GPU did during a call, from torch.profiler: how much of the communication ran beside attention."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

KINDS = ("attention", "communication", "other")
COLORS = {"attention": "#2e4057", "communication": "#d1495b", "other": "#b8b8b8"}

Interval = tuple[float, float]  # microseconds


def kind_of(kernel: str) -> str:
    if "nccl" in kernel.lower():
        return "communication"
    return (
        "attention" if "fwd_kernel" in kernel or "bwd_" in kernel else "other"
    )  # all three of the backward


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order."""
    joined: list[list[float]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return [(begin, end) for begin, end in joined]


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in union(intervals))


def common(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    b = union(b)
    return [
        (max(x[0], y[0]), min(x[1], y[1])) for x in union(a) for y in b if x[0] < y[1] and y[0] < x[1]
    ]  # fmt: skip


def kernels(trace: dict) -> dict[str, list[Interval]]:
    """The device's kernels and copies of a chrome trace, by kind."""
    found: dict[str, list[Interval]] = {kind: [] for kind in KINDS}
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            interval = (event["ts"], event["ts"] + event["dur"])
            found[kind_of(event["name"])].append(interval)
    return found


def summary(found: dict[str, list[Interval]]) -> dict[str, float]:
    """Microseconds of the call, of each kind, and of communication that ran beside attention."""
    everything = [interval for intervals in found.values() for interval in intervals]
    if not everything:
        return {}
    begin, end = min(x[0] for x in everything), max(x[1] for x in everything)
    hidden = length(common(found["communication"], found["attention"]))
    return {
        "call": end - begin,
        **{kind: length(found[kind]) for kind in KINDS},
        "communication_hidden": hidden,
        "idle": end - begin - length(everything),
    }


def describe(found: dict[str, float]) -> str:
    if not found:
        return "no kernel ran on a GPU"
    share = found["communication_hidden"] / found["communication"] if found["communication"] else 1
    return (
        f"call {found['call'] / 1e3:.2f} ms, attention {found['attention'] / 1e3:.2f}, communication "
        f"{found['communication'] / 1e3:.2f} of which {share:.0%} beside attention, other kernels "
        f"{found['other'] / 1e3:.2f}, idle {found['idle'] / 1e3:.2f}"
    )


def draw(found: dict[str, list[Interval]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    start = min(x[0] for intervals in found.values() for x in intervals)
    figure, axis = plt.subplots(figsize=(9, 2))
    for row, kind in enumerate(KINDS):
        bars = [((a - start) / 1e3, (b - a) / 1e3) for a, b in union(found[kind])]
        axis.broken_barh(bars, (-row - 0.4, 0.8), color=COLORS[kind])
    axis.set_yticks([-row for row in range(len(KINDS))], KINDS)
    axis.set_xlabel("ms")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def profile(call: Callable, device: torch.device, path: Path | None = None) -> dict[str, float]:
    """Profiles one call, warmed up, and draws it to `path`."""
    call()
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize(device)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize(device)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        found = kernels(json.loads(Path(file.name).read_text()))
    if path is not None and any(found.values()):
        draw(found, path)
    return summary(found)
