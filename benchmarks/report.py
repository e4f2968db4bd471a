"""Markdown from a result file: tables for people, and the README's blocks between markers."""

import re
from itertools import groupby
from pathlib import Path

from .compare import LONG, Standing, over_fastest, summary
from .overhead import WHAT

MODE_TITLE = {"fwd": "Forward", "bwd": "Backward"}
MISSING = "n/a"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """First column to the left, the others to the right, padded so that a terminal reads it too."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        first, *others = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join([first, *others]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def labels(result: dict) -> dict[str, str]:
    return {name: about["label"] for name, about in result["implementations"].items()}


def group_of(cell: dict) -> tuple:
    """(dtype, head_dim, head_dim_v, causal); head_dim_v is 0 where it is head_dim."""
    return cell["dtype"], cell["head_dim"], cell.get("head_dim_v", 0), cell["causal"]


def groups(result: dict, mode: str) -> list[tuple[tuple, list[dict]]]:
    """Cells of one mode by group_of, each sorted by seqlen."""
    cells = [c for c in result["cells"] if c["mode"] == mode and not c.get("name")]
    cells.sort(key=lambda cell: (*group_of(cell), cell["seqlen"]))
    return [(name, list(members)) for name, members in groupby(cells, group_of)]


def group_title(group: tuple) -> str:
    dtype, head_dim, head_dim_v, causal = group
    v = f" v{head_dim_v}" if head_dim_v else ""
    return f"{dtype} d{head_dim}{v} {'causal' if causal else 'full'}"


def seqlen_title(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def tflops_of(cell: dict, name: str) -> float | None:
    return cell["results"].get(name, {}).get("tflops")


def tflops_text(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def bold_if_best(value: float | None, best: float | None) -> str:
    """TFLOP/s, in bold if that is the best."""
    if value is None:
        return MISSING
    return f"**{tflops_text(value)}**" if value == best else tflops_text(value)


def speed_rows(result: dict, group: tuple, by_seqlen: dict, seqlens: list[int]) -> list[list[str]]:
    """One row per implementation that ran in one of the cells (best figure in bold), then flash3's share."""
    rows = []
    best = {
        s: max((tflops_of(c, n) or 0 for n in c["results"]), default=0)
        for s, c in by_seqlen.items()
    }
    for name, label in labels(result).items():
        if all(tflops_of(cell, name) is None for cell in by_seqlen.values()):
            continue  # the notes say why
        row = [f"{group_title(group)}: {label}"]
        for s in seqlens:
            value = tflops_of(by_seqlen[s], name) if s in by_seqlen else None
            row.append(bold_if_best(value, best.get(s)))
        rows.append(row)
    ceiling = result["ceilings"].get(group[0])
    if ceiling:
        shares = [tflops_of(by_seqlen[s], "flash3") if s in by_seqlen else None for s in seqlens]
        text = [MISSING if value is None else f"{value / ceiling:.0%}" for value in shares]
        rows.append([f"{group_title(group)}: flash3, share of matmul", *text])
    return rows


def speed_table(result: dict, mode: str) -> str:
    """TFLOP/s: seqlens across, groups and implementations down."""
    found = groups(result, mode)
    seqlens = sorted({cell["seqlen"] for _, cells in found for cell in cells})
    header = [f"{MODE_TITLE[mode]}, TFLOP/s; seqlen", *map(seqlen_title, seqlens)]
    rows = []
    for group, cells in found:
        rows += speed_rows(result, group, {cell["seqlen"]: cell for cell in cells}, seqlens)
    return markdown_table(header, rows)


def time_text(timed: dict | None) -> str:
    if timed is None or "error" in timed:
        return MISSING
    spread = (timed["ms_q3"] - timed["ms_q1"]) / timed["ms_median"]
    return f"{timed['ms_median']:.3f} ({spread:.1%})"


def time_table(result: dict, mode: str) -> str:
    """Median milliseconds and, in brackets, the interquartile range over the median."""
    names = labels(result)
    header = [f"{MODE_TITLE[mode]}, ms per call (spread)", "batch", "heads", *names.values()]
    rows = []
    for group, cells in groups(result, mode):
        for cell in cells:
            heads = f"{cell['heads']}/{cell['heads_kv']}"
            times = [time_text(cell["results"].get(name)) for name in names]
            title = f"{group_title(group)} {cell['seqlen']}"
            rows.append([title, str(cell["batch"]), heads, *times])
    return markdown_table(header, rows)


def memory_text(timed: dict | None) -> str:
    extra = (timed or {}).get("extra_bytes")
    return MISSING if extra is None else f"{extra / 2**20:.2f}"


def memory_table(result: dict, mode: str) -> str:
    """Peak MiB of one call beyond inputs and results (forward out and lse, backward gradients)."""
    names = labels(result)
    header = [f"{MODE_TITLE[mode]}, peak extra MiB", *names.values()]
    rows = [
        [
            f"{group_title(group)} {cell['seqlen']}",
            *(memory_text(cell["results"].get(name)) for name in names),
        ]
        for group, cells in groups(result, mode)
        for cell in cells
    ]
    return markdown_table(header, rows)


def overhead_table(result: dict) -> str:
    """Host microseconds per call, median and interquartile range."""
    names = labels(result)
    results = result["overhead"]["results"]
    rows = []
    for what, title in WHAT.items():
        row = [title]
        for name in names:
            timed = results.get(name, {}).get(what)
            spread = timed and timed["us_q3"] - timed["us_q1"]
            row.append(f"{timed['us_median']:.1f} (±{spread / 2:.1f})" if timed else MISSING)
        rows.append(row)
    return markdown_table(["Host time per call, µs", *names.values()], rows)


def standings_table(found: list[Standing]) -> str:
    rows = []
    for s in found:
        cell = s.cell
        title = f"{cell['mode']} {group_title(group_of(cell))}"
        value = MISSING if s.value is None else f"{s.value:.3f}"
        measured = over_fastest(cell)
        here = f"{measured[0]:.3f} ({measured[1]})" if measured else MISSING
        rows.append([f"{title} {cell['seqlen']}", value, s.best_peer or MISSING, here, s.why])
    header = ["Standing (above 1 is ahead)", "value", "best peer", "over the fastest here", "note"]
    return markdown_table(header, rows)


def standings_summary(found: list[Standing]) -> str:
    rows = [
        [
            f"{row['mode']}, {f'seqlen >= {LONG}' if row['shortest'] else 'all seqlens'}",
            str(row["cells"]),
            f"{row['min']:.3f}",
            f"{row['mean']:.3f}",
            f"{row['measured_min']:.3f}",
            f"{row['measured_mean']:.3f}",
        ]
        for row in summary(found)
    ]
    header = [
        "Standing",
        "cells",
        "min",
        "geometric mean",
        "over the fastest here: min",
        "geometric mean",
    ]
    return markdown_table(header, rows)


def notes(result: dict) -> str:
    """Machine, ceilings, how time was taken, what is missing and what failed."""
    machine, state = result["machine"], result.get("gpu_state", {}).get("after", {})
    lines = [
        f"{machine['device']}, torch {machine['torch']}, CUDA {machine['cuda']}, "
        f"cuDNN {machine['cudnn']}, {machine['date'][:10]}, commit {machine['git_commit']}."
    ]
    if state:
        lines.append("At the end: " + ", ".join(f"{k} {v}" for k, v in state.items()) + ".")
    for dtype, value in result["ceilings"].items():
        lines.append(f"Matmul ceiling {dtype} ({result['ceiling_size']}^3): {value:.4g} TFLOP/s.")
    for name, why in result["missing"].items():
        lines.append(f"Not measured: {name} ({why}).")
    errors = {}
    for cell in result["cells"]:
        for name, timed in cell["results"].items():
            if "error" in timed:
                errors.setdefault((name, timed["error"]), []).append(cell)
    for name, timed in (result.get("overhead") or {"results": {}})["results"].items():
        if "error" in timed:
            errors.setdefault((name, timed["error"]), []).append(None)
    for (name, error), cells in errors.items():
        lines.append(f"Failed: {name} in {len(cells)} measurement(s): {error}.")
    if result.get("aborted"):
        lines.append(f"The run ended early: {result['aborted']}.")
    return "\n".join(f"- {line}" for line in lines)


def named_table(result: dict, mode: str) -> str:
    """Cells that have a name, one a row: TFLOP/s of each implementation (best in bold), our time, our speed over the
    fastest other one."""
    names = labels(result)
    rows = []
    for cell in result["cells"]:
        if cell["mode"] != mode or not cell.get("name"):
            continue
        speeds = {name: tflops_of(cell, name) for name in names}
        best = max((value for value in speeds.values() if value is not None), default=None)
        texts = [bold_if_best(value, best) for value in speeds.values()]
        measured = over_fastest(cell)
        over = f"{measured[0]:.2f} ({measured[1]})" if measured else MISSING
        rows.append([cell["name"], *texts, time_text(cell["results"].get("flash3")), over])
    header = [f"{MODE_TITLE[mode]}, TFLOP/s", *names.values()]
    return markdown_table([*header, "flash3, ms (spread)", "over the fastest"], rows)


def modes_of(result: dict) -> list[str]:
    return [m for m in MODE_TITLE if groups(result, m)]


def blocks(result: dict, found: list[Standing] | None = None) -> dict[str, str]:
    """Every piece of the report by the name that README markers use, e.g. "fwd", "memory:bwd"."""
    made = {}
    for mode in modes_of(result):
        made[mode] = speed_table(result, mode)
        made[f"time:{mode}"] = time_table(result, mode)
        if result["machine"]["device_type"] == "cuda":
            made[f"memory:{mode}"] = memory_table(result, mode)
    for mode in MODE_TITLE:
        if any(cell["mode"] == mode and cell.get("name") for cell in result["cells"]):
            made[f"shapes:{mode}"] = named_table(result, mode)
    if result.get("overhead"):
        made["overhead"] = overhead_table(result)
    if found:
        made["standings"] = standings_table(found)
        if summary(found):
            made["standing"] = standings_summary(found)
    made["notes"] = notes(result)
    return made


def render(result: dict, found: list[Standing] | None = None) -> str:
    return "\n\n".join(blocks(result, found).values()) + "\n"


def fill_markers(text: str, made: dict[str, str]) -> tuple[str, list[str]]:
    """Replaces what stands between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`.

    Returns the new text and the names that were filled; other markers stay as they are.
    """
    filled = []

    def replace(match: re.Match) -> str:
        name = match["name"]
        if name not in made:
            return match[0]
        filled.append(name)
        return f"<!-- bench:{name} -->\n{made[name]}\n<!-- /bench:{name} -->"

    pattern = r"<!-- bench:(?P<name>[\w:]+) -->.*?<!-- /bench:(?P=name) -->"
    return re.sub(pattern, replace, text, flags=re.DOTALL), filled


def update_file(path: Path, made: dict[str, str]) -> list[str]:
    """Fills the markers of a file in place. Raises ValueError when it has none of ours."""
    text, filled = fill_markers(path.read_text(), made)
    if not filled:
        raise ValueError(f"{path} has no <!-- bench:NAME --> marker for any of {', '.join(made)}")
    path.write_text(text)
    return filled
