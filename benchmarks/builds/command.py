"""`python -m benchmarks builds`: check, then time, the rows of several kernel builds in one process.

A kernel that never ends can't be stopped from here: run it under `timeout`. --out is written again after each cell.
"""

import json
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from build_tools import toolchain

from .. import compare
from ..baselines import Implementation, find_implementations
from ..machine import describe_machine, gpu_state
from ..runner import Settings, describe
from ..shapes import MASKS, MODES, Cell, grid
from . import report
from .check import check_rows
from .library import Library, LinkError, find_builds, load
from .measure import measure_cell, rows_for


def paths(text: str) -> list[Path]:
    return [Path(word) for word in text.split(",")]


def add_arguments(parser: ArgumentParser) -> None:
    """What this command has beside the arguments of a measurement on the grid."""
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="DIR", help="made by build_tools/kernels.py")
    add("--mode", choices=MODES, default="both")
    add(
        "--tree", type=paths, metavar="DIR[,DIR]",
        help="source tree of all folders or of each (default: the one that the folder was built from)",
    )  # fmt: skip
    add(
        "--peers", type=lambda text: text.split(","), default=["cudnn"],
        help="timed beside the builds; the first is what their results are compared with (default cudnn)",
    )  # fmt: skip
    add("--check-only", action="store_true", help="compare with float64 and time nothing")
    add("--compare", type=Path, metavar="TARGETS.json", help="print the standing of every row")
    add("--out", type=Path, metavar="FILE.json", help="file for the results")


def say(line: str) -> None:
    print(line, flush=True)


def new_result(libraries: Sequence[Library], settings: Settings, device: torch.device) -> dict:
    return {
        "schema": 1,
        "command": "builds",
        "machine": describe_machine(device),
        "gpu_state": {"before": gpu_state(device)},
        "settings": vars(settings),
        "builds": [
            {key: str(value) for key, value in vars(library.build).items()} for library in libraries
        ],
        "tiles": {library.name(row): row.tile for library in libraries for row in library.rows},
        "implementations": {},
        "missing": {},
        "ceilings": {},
        "checks": [],
        "cells": [],
    }


def write(result: dict, out: Path | None) -> None:
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


def find_peers(names: Sequence[str], device: torch.device) -> list[Implementation]:
    """The implementations of these names; torch's where there is no GPU. Raises ValueError for one that is missing."""
    found, missing = find_implementations(device)
    by_name = {peer.name: peer for peer in found if peer.name != "flash3"}
    if device.type != "cuda":
        return list(by_name.values())
    for name in names:
        if name not in by_name:
            reason = missing.get(name, f"one of {', '.join(by_name)} is accepted")
            raise ValueError(f"--peers: {name}: {reason}")
    return [by_name[name] for name in names]


def measure_cells(
    result: dict,
    cells: Sequence[Cell],
    libraries,
    peers,
    settings: Settings,
    device,
    out: Path | None,
) -> None:
    """Fills result["cells"], with a progress bar; cells that no build has a row for are left out."""
    from tqdm import tqdm

    wrong = {check["name"] for check in result["checks"] if check["fault"]}
    result["implementations"] |= {peer.name: {"label": peer.label} for peer in peers}
    with tqdm(cells, unit="cell", dynamic_ncols=True) as progress:
        for cell in progress:
            rows = rows_for(cell, libraries, wrong)
            if rows:
                show = progress.set_postfix_str
                entry = measure_cell(cell, rows, peers, settings, device, show)
                result["cells"].append(entry)
                write(result, out)


def compare_builds(
    libraries: Sequence[Library],
    cells: Sequence[Cell],
    peers: Sequence[Implementation],
    args: Namespace,
    device: torch.device,
) -> dict:
    """Checks the rows of ``args.mode`` and times them unless ``args.check_only``. An error that ends the run is
    recorded, and what there is by then is kept."""
    settings = Settings(args.rounds, args.warmup, args.sample_ms, seed=args.seed)
    result = new_result(libraries, settings, device)
    for library in libraries:
        build = library.build
        say(f"{build.label}: {len(library.rows)} rows of {build.folder}, sources {build.tree}")
    try:
        for check in check_rows(libraries, MODES[args.mode], device, say):
            result["checks"].append(check.as_dict())
        if not args.check_only:
            measure_cells(result, cells, libraries, peers, settings, device, args.out)
    except RuntimeError as error:  # a launch that failed late, or DeviceLost
        result["aborted"] = describe(error)
    result["gpu_state"]["after"] = gpu_state(device)
    write(result, args.out)
    return result


def failed(result: dict) -> bool:
    """Whether a row is wrong or raised, there was none, or the run ended early."""
    faults = [check["fault"] for check in result["checks"]]
    errors = [
        name
        for cell in result["cells"]
        for name, timed in cell["results"].items()
        if "error" in timed and name in result["tiles"]
    ]
    return bool(result.get("aborted") or errors or any(faults) or not faults)


def main(args: Namespace, device: torch.device) -> int:
    """Exit status: 0, 1 if a row is wrong, 2 if there is nothing to run."""
    try:
        builds = find_builds(args.folders, args.tree)
        cells = grid(
            MODES[args.mode], args.dtype, args.head_dims, args.seqlens, MASKS[args.causal],
            args.tokens, args.hidden, args.group, args.head_dim_v,
        )  # fmt: skip
        peers = find_peers(args.peers, device)
        targets = compare.load_targets(args.compare) if args.compare else None
        toolkit = toolchain.find_toolkit()
        if toolkit is None:
            raise LinkError("no CUDA toolkit was found; set CUDA_HOME to its folder")
        with tempfile.TemporaryDirectory() as folder:
            libraries = load(builds, toolkit, Path(folder))
    except (ValueError, OSError, LinkError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = compare_builds(libraries, cells, peers, args, device)
    print(report.render(result, targets))
    return 1 if failed(result) else 0
