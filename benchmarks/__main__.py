"""Command line: `python -m benchmarks fwd|bwd|both|overhead` measures flash3 beside its peers, `fp8` the
float8 forward, `builds` compares kernel builds, `report` renders a file."""

import argparse
import json
import sys
from pathlib import Path

import torch

from . import compare, features, fp8, report
from .baselines import find_implementations
from .builds import command as builds
from .machine import describe_machine, gpu_state
from .overhead import measure_overhead
from .plot import plot
from .runner import DeviceLost, Settings, measure_cell
from .shapes import (
    DTYPES,
    HEAD_DIMS,
    HIDDEN,
    MASKS,
    MODES,
    SEQLENS,
    TOKENS,
    Cell,
    grid,
    named_cells,
)
from .timing import matmul_ceiling


def integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def as_list(values) -> str:
    return ",".join(map(str, values))


def measuring_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dtype", choices=DTYPES, default="bf16")
    add("--rounds", type=int, default=7, help="samples per implementation (default 7)")


def head_dims_argument(parser: argparse.ArgumentParser) -> None:
    default = list(HEAD_DIMS)
    parser.add_argument("--head-dims", type=integers, default=default, help=as_list(HEAD_DIMS))


def peers_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--only", type=lambda text: text.split(","), help="implementations, e.g. flash3,cudnn")
    add("--deterministic", action="store_true", help="flash3's deterministic gradients too")
    output_arguments(parser)


def grid_arguments(parser: argparse.ArgumentParser) -> None:
    head_dims_argument(parser)
    add = parser.add_argument
    add("--seqlens", type=integers, default=list(SEQLENS), help=as_list(SEQLENS))
    add("--causal", choices=MASKS, default="both")
    add("--tokens", type=int, default=TOKENS, help="batch x seqlen")
    add("--hidden", type=int, default=HIDDEN, help="query heads x head_dim")
    add("--head-dim-v", type=int, default=0, help="of v and out (default: that of q and k)")
    add("--group", type=int, default=1, help="query heads per key/value head")
    timing_arguments(parser)


def timing_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--warmup", type=float, default=0.1, help="seconds per implementation and cell")
    add("--sample-ms", type=float, default=3.0, help="least length of one sample")
    add("--seed", type=int, default=0)


def rotate_argument(parser: argparse.ArgumentParser) -> None:
    rotate = "sets of inputs to go through in turn"
    parser.add_argument("--rotate", type=int, default=1, help=rotate)


def output_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--compare", type=Path, metavar="TARGETS.json", help="print our standing per cell")
    add("--out", type=Path, help="folder for JSON, markdown and plots")
    add("--name", help="file name stem in --out (default: command and dtype)")
    add("--plot", action="store_true", help="write PNG plots to --out")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in MODES:
        what = "forward and backward" if name == "both" else report.MODE_TITLE[name].lower()
        command = commands.add_parser(name, help=f"time {what}")
        measuring_arguments(command)
        grid_arguments(command)
        peers_arguments(command)
        rotate_argument(command)
        command.add_argument(
            "--overhead", action="store_true", help="measure the call overhead too"
        )
    command = commands.add_parser("fp8", help="time the float8 forward beside our 16-bit one")
    measuring_arguments(command)
    grid_arguments(command)
    command.set_defaults(head_dims=[64, 128, 256])
    output_arguments(command)
    command = commands.add_parser("shapes", help="time shapes that people run")
    command.add_argument("--mode", choices=("fwd", "bwd"), default="fwd")
    command.add_argument(
        "--match", default="", help="regular expression: only shapes with such a name"
    )
    measuring_arguments(command)
    peers_arguments(command)
    timing_arguments(command)
    rotate_argument(command)
    command = commands.add_parser("overhead", help="host time per call")
    measuring_arguments(command)
    head_dims_argument(command)
    peers_arguments(command)
    command = commands.add_parser("builds", help="check and time kernel builds beside each other")
    builds.add_arguments(command)
    measuring_arguments(command)
    grid_arguments(command)
    command = commands.add_parser("report", help="tables and plots of a result file, without a GPU")
    command.add_argument("result", type=Path)
    command.add_argument("--readme", type=Path, help="file whose <!-- bench:NAME --> to fill")
    prefix = "what the NAMEs of this result begin with, e.g. d256: for <!-- bench:d256:fwd -->"
    command.add_argument("--prefix", default="", help=prefix)
    output_arguments(command)
    args = parser.parse_args(argv)
    if getattr(args, "plot", False) and not args.out:
        parser.error("--plot needs --out, the folder to write to")
    if getattr(args, "plot", False) and args.command == "shapes":
        parser.error("--plot draws the grid, shapes is a table")
    return args


def cells_of(args) -> list[Cell]:
    """What a measuring command asks for. Raises ValueError for shapes that do not divide or do not exist."""
    if args.command == "shapes":
        return named_cells(args.mode, args.dtype, args.match)
    return grid(
        MODES[args.command], args.dtype, args.head_dims, args.seqlens, MASKS[args.causal],
        args.tokens, args.hidden, args.group, args.head_dim_v,
    )  # fmt: skip


def measure_cells(result: dict, args, implementations, device: torch.device) -> None:
    """Fills result["ceilings"] and result["cells"], with a progress bar."""
    from tqdm import tqdm

    settings = Settings(args.rounds, args.warmup, args.sample_ms, args.rotate, args.seed)
    cells = cells_of(args)
    size = 8192 if device.type == "cuda" else 512
    result["settings"] = vars(settings)
    result["ceiling_size"] = size
    result["ceilings"][args.dtype] = matmul_ceiling(
        DTYPES[args.dtype], device, size, args.warmup, args.sample_ms, args.rounds
    )
    with tqdm(cells, unit="cell", dynamic_ncols=True) as progress:
        for cell in progress:
            progress.set_postfix_str(str(cell))
            entry = measure_cell(cell, implementations, settings, device)
            result["cells"].append(entry)
            error = entry["results"].get("flash3", {}).get("error")
            if error:
                progress.write(f"{cell}: flash3: {error}", file=sys.stderr)


def measure(args) -> dict:
    """Runs a measuring command; what it has when the GPU is lost is kept."""
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    implementations, missing = find_implementations(device, args.deterministic)
    if args.only:
        unknown = set(args.only) - {i.name for i in implementations} - set(missing)
        if unknown:
            raise ValueError(f"--only: unknown implementation {', '.join(sorted(unknown))}")
        implementations = [i for i in implementations if i.name in args.only]
        missing = {name: why for name, why in missing.items() if name in args.only}
    result = {
        "schema": 1,
        "command": args.command,
        "machine": describe_machine(device),
        "gpu_state": {"before": gpu_state(device)},
        "implementations": {
            i.name: {"label": i.label, "version": str(i.version), "layout": i.layout}
            for i in implementations
        },
        "missing": missing,
        "ceilings": {},
        "cells": [],
    }
    try:
        if args.command != "overhead":
            measure_cells(result, args, implementations, device)
        if args.command == "overhead" or getattr(args, "overhead", False):
            result["overhead"] = measure_overhead(
                implementations, args.dtype, args.head_dims[-1], device, args.rounds
            )
    except DeviceLost as error:
        result["aborted"] = str(error)
    result["gpu_state"]["after"] = gpu_state(device)
    return result


def failed(result: dict) -> bool:
    """Whether flash3 was refused, raised, or the run ended early."""
    entries = [*result["cells"], result.get("overhead") or {"results": {}}]
    return bool(result.get("aborted")) or any(
        "error" in entry["results"].get("flash3", {}) for entry in entries
    )


def write(args, result: dict, found) -> None:
    """JSON (of a new measurement), markdown and plots into --out."""
    args.out.mkdir(parents=True, exist_ok=True)
    dtypes = sorted({cell["dtype"] for cell in result["cells"]})
    stem = args.name or "-".join([result["command"], *dtypes])
    written = [args.out / f"{stem}.md"]
    written[0].write_text(report.render(result, found))
    if args.command != "report":
        written.append(args.out / f"{stem}.json")
        written[-1].write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        written += plot(result, args.out, stem)
    print("\nWritten: " + ", ".join(map(str, written)))


def fill(args, made: dict[str, str]) -> int:
    """Prints the blocks, or fills the markers of --readme with them."""
    if args.readme is None:
        print("\n\n".join(made.values()))
        return 0
    filled = report.update_file(args.readme, {args.prefix + name: x for name, x in made.items()})
    print(f"Filled in {args.readme}: {', '.join(filled)}")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.command in ("builds", "fp8"):
        if not torch.cuda.is_available():
            print(f"error: {args.command} needs a GPU that torch can use", file=sys.stderr)
            return 2
        own_main = builds.main if args.command == "builds" else fp8.main
        return own_main(args, torch.device("cuda"))
    try:
        stored = args.command == "report"
        result = json.loads(args.result.read_text()) if stored else measure(args)
        targets = compare.load_targets(args.compare) if args.compare else None
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if result["command"] in ("fp8", "features"):
        if args.out:
            print(f"error: --out: of a grid alone, not of {result['command']}", file=sys.stderr)
            return 2
        is_fp8 = result["command"] == "fp8"
        return fill(args, fp8.blocks(result, targets or {}) if is_fp8 else features.blocks(result))
    found = compare.standings(result["cells"], targets) if targets is not None else None
    print(report.render(result, found))
    if args.out:
        write(args, result, found)
    if args.command == "report":
        return fill(args, report.blocks(result, found)) if args.readme else 0
    return 1 if failed(result) else 0


if __name__ == "__main__":
    sys.exit(main())
