"""Float8: the kernel alone, with the quantiser, our own 16-bit forward, and the error beside the speed.

The ceiling is torch._scaled_mm, e4m3 with fast accumulation, 8192^3, the median of three times in the same run; the
targets' unit is a share of it, since no other float8 attention ships with torch.
"""

import json
import statistics
import sys
from dataclasses import dataclass

import torch

import flash3
from flash3 import checks_fp8, ops_fp8, reference
from flash3.reference_fp8 import BLOCK, E4M3

from .compare import CELL_KEY, geometric_mean, load_targets
from .machine import describe_machine
from .problem import make_values
from .report import markdown_table, seqlen_title
from .runner import Settings, record_error
from .shapes import MASKS, Cell, grid
from .timing import Contender, interleave, warm_up

NAMES = {
    "fp8": "fp8, block scales",
    "fp8_natural": "fp8, V transposed in the kernel",
    "fp8_unscaled": "fp8, no scales",
    "fp8_two_level": "fp8, sums of P V in two levels",
    "fp8_call": "fp8 from bf16, with quantiser",
    "quantize": "quantiser alone",
    "flash3": "bf16",
}
BLOCK_ROWS = 128
ERROR_ROWS = 256  # the last queries of one head are compared with float64
WRONG = 0.1  # relative error above which a kernel is wrong, not inexact: float8 gives 0.04 to 0.06 on N(0, 1)


@dataclass(frozen=True)
class Fp8Standing:
    cell: dict
    value: float | None


def scaled_mm_ceiling(device: torch.device, size: int, settings: Settings) -> float:
    """TFLOP/s of an e4m3 matrix product of N(0, 1) inputs with one scale each."""
    a, b = (torch.randn(size, size, device=device).to(E4M3) for _ in range(2))
    one = torch.ones((), device=device)

    def call() -> torch.Tensor:
        return torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return 2 * size**3 / time_alone(call, device, settings) * 1e-9


def copy_bandwidth(device: torch.device, settings: Settings) -> float:
    """TB/s of a copy far larger than L2, reading and writing counted."""
    source = torch.empty(2**29, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_alone(lambda: target.copy_(source), device, settings) * 1e-9


def time_alone(call, device: torch.device, settings: Settings) -> float:
    """Milliseconds, median."""
    contender = Contender("alone", call)
    calls = {"alone": warm_up(contender, device, settings.warmup_s, settings.sample_ms)}
    samples = interleave([contender], calls, settings.rounds, device)["alone"]
    return statistics.median(samples.milliseconds)


def quantize(q, k, v, transpose_v: bool):
    return ops_fp8.quantize_qkv(q, k, v, None, None, False, BLOCK, BLOCK_ROWS, True, 0, transpose_v)


def make_calls(cell: Cell, values: dict) -> dict:
    """name -> a call that returns out, or the quantised tensors."""
    q, k, v = (values[name] for name in "qkv")
    causal, scale = cell.causal, cell.head_dim**-0.5

    def attend(stored, transposed: bool, scaled: bool = True, promote_every: int = 0):
        descales, softmax_scale = stored[3:], scale
        if not scaled:  # scores of the same size, or the softmax has other work to do
            softmax_scale *= (descales[0].mean() * descales[1].mean()).item()
            descales = (None,) * 3
        return lambda: ops_fp8.fp8_fwd(
            *stored[:3], *descales, BLOCK_ROWS, BLOCK_ROWS, BLOCK_ROWS, softmax_scale, 1.0, causal,
            transposed, q.dtype, promote_every,
        )[0]  # fmt: skip

    transposed, natural = (quantize(q, k, v, transpose_v) for transpose_v in (True, False))
    two_level = {}
    if cell.head_dim <= checks_fp8.TWO_LEVEL_HEAD_DIM:
        two_level["fp8_two_level"] = attend(transposed, True, promote_every=1)
    return {
        "fp8": attend(transposed, True),
        "fp8_natural": attend(natural, False),
        "fp8_unscaled": attend(transposed, True, scaled=False),
        **two_level,
        "fp8_call": lambda: flash3.flash_attn_fp8_func(q, k, v, causal=causal),
        "quantize": lambda: quantize(q, k, v, True),
        "flash3": lambda: flash3.flash_attn_func(q, k, v, causal=causal),
    }


def relative_error(cell: Cell, values: dict, out: torch.Tensor) -> float:
    """RMSE over the RMS of the right result, of the last rows of the first head."""
    q = values["q"][:1, -ERROR_ROWS:, :1].double()
    k, v = (values[name][:1, :, :1].double() for name in "kv")
    right, _ = reference.attention_forward(q, k, v, cell.head_dim**-0.5, cell.causal)
    difference = out[:1, -ERROR_ROWS:, :1].double() - right
    return (difference.square().mean() / right.square().mean()).sqrt().item()


def measure_cell(cell: Cell, settings: Settings, device: torch.device) -> dict:
    """The cell's entry of the result file: for each name time, TFLOP/s and error, or the error that it raised."""
    values = make_values(cell, device, settings.seed)
    results: dict[str, dict] = {}
    calls, errors = {}, {}
    for name, call in make_calls(cell, values).items():
        try:
            out = call()
            if name not in ("quantize", "fp8_unscaled"):
                errors[name] = relative_error(cell, values, out)
                if not errors[name] < WRONG:
                    raise ValueError(f"relative error {errors[name]:.3g}: not timed")
            calls[name] = call
        except Exception as error:
            record_error(error, results, name, device)
    contenders = [Contender(name, call) for name, call in calls.items()]
    per_sample = {
        c.name: warm_up(c, device, settings.warmup_s, settings.sample_ms) for c in contenders
    }
    for name, samples in interleave(contenders, per_sample, settings.rounds, device).items():
        timed = samples.as_dict()
        if name == "quantize":
            elements = sum(values[x].numel() for x in "qkv")
            timed["tbps"] = 3 * elements / timed["ms_median"] * 1e-9  # 2 bytes read, 1 written
        else:
            timed["tflops"] = cell.tflops(timed["ms_median"])
        if name in errors:
            timed["relative_error"] = errors[name]
        results[name] = timed
    results = {name: results[name] for name in NAMES if name in results}
    return {**cell.as_dict(), "results": results}


def measure(cells: list[Cell], settings: Settings, device: torch.device, result: dict) -> None:
    """Fills result["ceilings"] and result["cells"]."""
    from tqdm import tqdm

    size = 8192
    result["settings"], result["ceiling_size"] = vars(settings), size
    # Single measurements differ by a tenth with the clocks: before the cells, half way and after them.
    products = [scaled_mm_ceiling(device, size, settings)]
    result["ceilings"]["copy_TBps"] = copy_bandwidth(device, settings)
    for done, cell in enumerate(tqdm(cells, unit="cell", dynamic_ncols=True), start=1):
        result["cells"].append(measure_cell(cell, settings, device))
        if done == (len(cells) + 1) // 2:
            products.append(scaled_mm_ceiling(device, size, settings))
    products.append(scaled_mm_ceiling(device, size, settings))
    result["ceilings"] |= {"fp8": statistics.median(products), "fp8_measured": products}


def standings(result: dict, targets: dict[tuple, dict]) -> list[Fp8Standing]:
    """Our share of the ceiling over the best peer's, as the targets have it; None without a target."""
    found = []
    for cell in result["cells"]:
        key = tuple("e4m3" if name == "dtype" else cell[name] for name in CELL_KEY)
        target = targets.get(key, {}).get("best_over_fp8_mm")
        ours = cell["results"].get("fp8", {}).get("tflops")
        known = target and ours and cell["heads"] == cell["heads_kv"]
        value = ours / result["ceilings"]["fp8"] / target if known else None
        found.append(Fp8Standing(cell, value))
    return found


def speed_rows(cells: list[dict], found: dict[int, float | None]) -> list[list[str]]:
    rows = []
    for cell in cells:
        results = cell["results"]
        row = [seqlen_title(cell["seqlen"])]
        for name in ("fp8", "fp8_natural", "fp8_unscaled", "fp8_two_level", "fp8_call", "flash3"):
            timed = results.get(name, {})
            row.append(f"{timed['tflops']:.0f}" if "tflops" in timed else "n/a")
        quantised = results.get("quantize", {})
        row.append(f"{quantised['tbps']:.2f}" if "tbps" in quantised else "n/a")
        for name in ("fp8", "fp8_two_level", "flash3"):
            error = results.get(name, {}).get("relative_error")
            row.append("n/a" if error is None else f"{100 * error:.2f} %")
        value = found.get(id(cell))
        row.append("n/a" if value is None else f"{value:.2f}")
        rows.append(row)
    return rows


HEADER = [
    "seqlen", "fp8", "V natural", "no scales", "two levels", "from bf16", "bf16", "quantiser, TB/s", "error fp8",
    "two levels", "error bf16", "standing",
]  # fmt: skip


def render(result: dict, found: list[Fp8Standing]) -> str:
    """Markdown: a table for each head_dim and mask, and the summary."""
    values = {id(s.cell): s.value for s in found}
    groups: dict[tuple, list[dict]] = {}
    for cell in result["cells"]:
        key = tuple(cell[name] for name in ("dtype", "head_dim", "causal", "heads", "heads_kv"))
        groups.setdefault(key, []).append(cell)
    ceilings = result["ceilings"]
    parts = [
        "## Float8 forward, TFLOP/s",
        f"torch._scaled_mm {result['ceiling_size']}^3, e4m3: {ceilings['fp8']:.0f} TFLOP/s; copy "
        f"{ceilings['copy_TBps']:.2f} TB/s. Standing: our share of that product's speed over the best peer's.",
    ]
    for (_, head_dim, causal, heads, heads_kv), cells in groups.items():
        mask = "causal" if causal else "full"
        parts.append(f"### d{head_dim}, {mask}, {heads} heads, {heads_kv} key/value heads")
        parts.append(markdown_table(HEADER, speed_rows(cells, values)))
    known = [s.value for s in found if s.value is not None]
    if known:
        parts.append(
            f"Standing over {len(known)} cells: least {min(known):.2f}, geometric mean {geometric_mean(known):.2f}."
        )
    return "\n\n".join(parts) + "\n"


SHORT = {
    "fp8": "float8",
    "fp8_natural": "float8, v as it is",
    "fp8_call": "from bfloat16",
    "flash3": "our bfloat16",
}


def blocks(result: dict, targets: dict[tuple, dict]) -> dict[str, str]:
    """The table for a README: a line for each implementation, a column for each length."""
    lengths = sorted({cell["seqlen"] for cell in result["cells"]})
    found = {id(s.cell): s.value for s in standings(result, targets)}
    groups: dict[str, dict[int, dict]] = {}
    for cell in result["cells"]:
        title = f"d{cell['head_dim']} {'causal' if cell['causal'] else 'full'}"
        groups.setdefault(title, {})[cell["seqlen"]] = cell
    rows = []
    for title, cells in groups.items():
        for name, label in SHORT.items():
            timed = [cells[n]["results"].get(name, {}).get("tflops") for n in lengths]
            rows.append([f"{title}: {label}", *("n/a" if t is None else f"{t:.0f}" for t in timed)])
        values = [found.get(id(cells[n])) for n in lengths]
        rows.append([f"{title}: standing", *("n/a" if v is None else f"{v:.2f}" for v in values)])
    header = ["Float8 forward, TFLOP/s; seqlen", *map(seqlen_title, lengths)]
    return {"fp8": markdown_table(header, rows)}


def plot(result: dict, path) -> None:
    """TFLOP/s over error: one panel for each head_dim and mask, a point for each length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = result["cells"]
    panels = sorted({(cell["head_dim"], cell["causal"]) for cell in cells})
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 4), squeeze=False)
    styles = {"fp8": "#d1495b", "fp8_call": "#edae49", "flash3": "#2e4057"}
    for axis, (head_dim, causal) in zip(axes[0], panels, strict=True):
        for name, colour in styles.items():
            timed = [
                c["results"].get(name, {})
                for c in cells
                if (c["head_dim"], c["causal"]) == (head_dim, causal)
            ]
            points = [(100 * t["relative_error"], t["tflops"]) for t in timed if "tflops" in t]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", color=colour, label=NAMES[name])
        axis.set_xscale("log")
        axis.set_title(f"d{head_dim}, {'causal' if causal else 'full'}")
        axis.set_xlabel("error, % of the output's RMS")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("TFLOP/s")
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def failed(result: dict) -> bool:
    return any("error" in timed for cell in result["cells"] for timed in cell["results"].values())


def main(args, device: torch.device) -> int:
    """`python -m benchmarks fp8`. Returns 1 if a call raised, 2 for arguments that cannot be met."""
    try:
        cells = grid(
            ("fwd",), args.dtype, args.head_dims, args.seqlens, MASKS[args.causal], args.tokens,
            args.hidden, args.group,
        )  # fmt: skip
        targets = load_targets(args.compare) if args.compare else {}
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = {
        "schema": 1,
        "command": "fp8",
        "machine": describe_machine(device),
        "implementations": NAMES,
        "ceilings": {},
        "cells": [],
    }
    settings = Settings(args.rounds, args.warmup, args.sample_ms, seed=args.seed)
    measure(cells, settings, device, result)
    text = render(result, standings(result, targets))
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        stem = args.out / (args.name or f"fp8-{args.dtype}")
        stem.with_suffix(".md").write_text(text)
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        if args.plot:
            plot(result, stem.with_suffix(".png"))
    return 1 if failed(result) else 0
