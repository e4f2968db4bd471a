"""What a comparison of builds prints: one row per kernel row, seqlens across."""

from collections.abc import Callable

from .. import compare
from ..report import (
    MISSING,
    MODE_TITLE,
    group_title,
    groups,
    markdown_table,
    modes_of,
    notes,
    seqlen_title,
    tflops_text,
)

Text = Callable[[dict, str], str | None]  # (cell, contender) -> what stands in the table


def speed_text(cell: dict, name: str) -> str | None:
    timed = cell["results"].get(name, {})
    if "tflops" not in timed:
        return None
    spread = (timed["ms_q3"] - timed["ms_q1"]) / timed["ms_median"]
    return f"{tflops_text(timed['tflops'])} ({spread:.1%})"


def ratio_text(cell: dict, name: str) -> str | None:
    ratio = cell["results"].get(name, {}).get("over_first")
    return f"{ratio['median']:.3f} (±{(ratio['q3'] - ratio['q1']) / 2:.3f})" if ratio else None


def standing_text(targets: dict[tuple, dict]) -> Text:
    def text(cell: dict, name: str) -> str | None:
        results = {"flash3": cell["results"].get(name), "cudnn": cell["results"].get("cudnn")}
        value = compare.standing_of({**cell, "results": results}, targets).value
        return None if value is None else f"{value:.3f}"

    return text


def table(result: dict, mode: str, what: str, text: Text, with_baseline: bool = False) -> str:
    """One row for each contender that ran in a group of cells; a cell that lacks it has n/a."""
    found = groups(result, mode)
    seqlens = sorted({cell["seqlen"] for _, cells in found for cell in cells})
    rows = []
    for group, cells in found:
        by_seqlen = {cell["seqlen"]: cell for cell in cells}
        names = list(dict.fromkeys(name for cell in cells for name in cell["results"]))
        for name in names:
            label = result["implementations"].get(name, {}).get("label")
            if label is not None and not with_baseline:
                continue
            texts = [text(by_seqlen[s], name) if s in by_seqlen else None for s in seqlens]
            title = f"{group_title(group)}: {label}" if label else name
            tile = result["tiles"].get(name)
            rows.append([f"{title} {tile}" if tile else title, *(x or MISSING for x in texts)])
    header = [f"{MODE_TITLE[mode]}, {what}; seqlen", *map(seqlen_title, seqlens)]
    return markdown_table(header, rows)


def check_lines(result: dict) -> str:
    """How many rows are right, and each that is not with its fault."""
    checks = result["checks"]
    wrong = [check for check in checks if check["fault"]]
    lines = [f"- {len(checks) - len(wrong)} of {len(checks)} rows are right."]
    lines += [f"- WRONG, not timed: {check['name']}: {check['fault']}" for check in wrong]
    return "\n".join(lines)


def render(result: dict, targets: dict[tuple, dict] | None = None) -> str:
    """Markdown: checks, then per pass TFLOP/s, the ratio to the first row of each cell, and the standing."""
    parts = [check_lines(result)]
    for mode in modes_of(result):
        parts.append(table(result, mode, "TFLOP/s (spread)", speed_text, with_baseline=True))
        parts.append(table(result, mode, "speed over the first row", ratio_text))
        if targets is not None:
            what = "standing (above 1 is ahead of the best peer)"
            parts.append(table(result, mode, what, standing_text(targets)))
    return "\n\n".join([*parts, notes(result)]) + "\n"
