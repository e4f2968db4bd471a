"""What `make demo` runs: flash3's results, its speed on a GPU, and a model trained with it.

Exit status 1 if a result is wrong or the training does not learn.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import parity
import stdlib_text
import torch
import train_gpt

import flash3
from flash3 import ops

sys.path.append(str(Path(__file__).parents[1]))  # for benchmarks, which is not installed
UNIFORM_LOSS = math.log(stdlib_text.VOCABULARY)  # of a model that knows nothing


def heading(text: str) -> None:
    print(f"\n== {text} ==\n", flush=True)


def choose_device() -> tuple[torch.device, str]:
    """The device that the demo runs on, and a sentence on which path that is and why."""
    if flash3.is_available():
        name = torch.cuda.get_device_name()
        return torch.device("cuda"), f"{name}: the Hopper kernels run."
    if not torch.cuda.is_available():
        why = "torch sees no GPU"
    elif ops.kernels_missing is not None:
        why = f"the kernels are missing: {ops.kernels_missing}"
    else:
        major, minor = torch.cuda.get_device_capability()
        why = (
            f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}, and the "
            "kernels run on 9.0 (Hopper) only"
        )
    return torch.device("cpu"), f"The CPU reference path runs, because {why}."


def show_speed(device: torch.device) -> None:
    """A few cells of the benchmark grid; `python -m benchmarks` has all of it."""
    from benchmarks import report
    from benchmarks.baselines import find_implementations
    from benchmarks.runner import Settings, measure_cell
    from benchmarks.shapes import grid

    implementations, missing = find_implementations(device)
    cells = grid(("fwd", "bwd"), head_dims=(128,), seqlens=(1024, 4096, 16384), causals=(True,))
    result = {
        "cells": [measure_cell(cell, implementations, Settings(), device) for cell in cells],
        "implementations": {i.name: {"label": i.label} for i in implementations},
        "ceilings": {},
    }
    for mode in ("fwd", "bwd"):
        print(report.speed_table(result, mode) + "\n")
    print("\n".join(f"Not measured: {name} ({why})" for name, why in missing.items()))


def train(device: torch.device, out: Path, steps: int | None) -> bool:
    """The default training run with flash3; whether it learned."""
    settings = train_gpt.default_settings(device.type)
    if steps is not None:
        settings = replace(settings, steps=steps)
    run = train_gpt.train(settings, stdlib_text.load(device))
    train_gpt.report([run], out)
    return run.validation_loss < 0.75 * UNIFORM_LOSS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="for the loss curve")
    parser.add_argument("--steps", type=int, help="training steps (default: by device)")
    args = parser.parse_args(argv)

    heading("Machine")
    device, which = choose_device()
    print(f"flash3 {flash3.__version__}, torch {torch.__version__}\n{which}")
    heading("Parity with float64")
    table, correct = parity.table(device)
    print(table)
    if not correct:
        print("\nflash3 is wrong here: `python -m flash3.doctor` says more.", file=sys.stderr)
        return 1
    if device.type == "cuda":
        heading("Speed")
        show_speed(device)
    heading("A small GPT on the Python standard library")
    if not train(device, args.out, args.steps):
        print("the model did not learn", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
