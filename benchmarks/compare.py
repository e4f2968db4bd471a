"""Where flash3 stands against the best peer, also on machines where that peer is not installed.

A target row holds `best_over_cudnn`: the best peer's TFLOP/s over those of cuDNN's kernel (which
ships inside torch), both measured in one run. So

    standing = (flash3 / cudnn, both from this run) / best_over_cudnn

is above 1 where flash3 is ahead of the best peer. Ratios within one run hold far better from day
to day than TFLOP/s do. Where the peer itself is measured in this run, that says more: `over_fastest`.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

LONG = 2048  # summaries are also given over the cells from this seqlen on
TARGET_KEY = ("mode", "dtype", "dim", "causal", "seq", "batch", "heads")
CELL_KEY = ("mode", "dtype", "head_dim", "causal", "seqlen", "batch", "heads")


@dataclass(frozen=True)
class Standing:
    """`value` is None where it can't be told, and `why` says what is missing."""

    cell: dict
    value: float | None
    best_peer: str | None
    why: str = ""


def load_targets(path: Path) -> dict[tuple, dict]:
    """Rows of the target file by mode, dtype, dim, causal, seq, batch and heads."""
    rows = json.loads(Path(path).read_text())["rows"]
    return {tuple(row[key] for key in TARGET_KEY): row for row in rows}


def over_fastest(cell: dict) -> tuple[float, str] | None:
    """flash3's speed over that of the fastest other implementation of this run, and its name."""
    speeds = {name: timed["tflops"] for name, timed in cell["results"].items() if "tflops" in timed}
    ours = speeds.pop("flash3", None)
    if ours is None or not speeds:
        return None
    name = max(speeds, key=speeds.__getitem__)
    return ours / speeds[name], name


def standing_of(cell: dict, targets: dict[tuple, dict]) -> Standing:
    target = targets.get(tuple(cell[key] for key in CELL_KEY))
    if target is None or "best_over_cudnn" not in target or cell["heads_kv"] != cell["heads"]:
        return Standing(cell, None, None, "no target for this shape")
    for name in ("flash3", "cudnn"):
        timed = cell["results"].get(name)
        if timed is None or "tflops" not in timed:
            why = timed["error"] if timed else "not measured"
            return Standing(cell, None, target["best_peer"], f"{name}: {why}")
    ratio = cell["results"]["flash3"]["tflops"] / cell["results"]["cudnn"]["tflops"]
    return Standing(cell, ratio / target["best_over_cudnn"], target["best_peer"])


def standings(cells: list[dict], targets: dict[tuple, dict]) -> list[Standing]:
    return [standing_of(cell, targets) for cell in cells]


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary(found: list[Standing]) -> list[dict]:
    """Minimum and geometric mean per mode, over all cells and over the long ones."""
    rows = []
    for mode in ("fwd", "bwd"):
        for shortest in (0, LONG):
            counted = [
                s
                for s in found
                if s.value is not None and s.cell["mode"] == mode and s.cell["seqlen"] >= shortest
            ]
            values = [s.value for s in counted]
            measured = [over_fastest(s.cell)[0] for s in counted]
            if values:
                rows.append(
                    {
                        "mode": mode,
                        "shortest": shortest,
                        "cells": len(values),
                        "min": min(values),
                        "mean": geometric_mean(values),
                        "measured_min": min(measured),
                        "measured_mean": geometric_mean(measured),
                    }
                )
    return rows
