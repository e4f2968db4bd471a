"""Bar charts of a result file: one PNG per mode, one panel per dtype, head dim and mask."""

from pathlib import Path

from .report import (
    MODE_TITLE,
    group_title,
    groups,
    labels,
    modes_of,
    seqlen_title,
    tflops_text,
)

COLOURS = {
    "flash3": "#d1495b",
    "cudnn": "#66a182",
    "fa2": "#8d99ae",
    "flash_attn": "#5c677d",
    "fa3": "#2e4057",
    "fa4": "#edae49",
    "sdpa": "#66a182",
}


def draw_panel(axis, title: str, cells: list[dict], names: dict[str, str], ceiling) -> None:
    """Grouped bars over seqlen, quartiles as whiskers, the measured matmul as a dashed line."""
    width = 0.84 / len(names)
    for i, (name, label) in enumerate(names.items()):
        offset = (i - (len(names) - 1) / 2) * width
        for x, cell in enumerate(cells):
            timed = cell["results"].get(name, {})
            value = timed.get("tflops")
            if value is None:
                axis.text(x + offset, 0, " n/a", rotation=90, ha="center", va="bottom", fontsize=7)
                continue
            low, high = (value * timed["ms_median"] / timed[q] for q in ("ms_q3", "ms_q1"))
            axis.bar(x + offset, value, width, color=COLOURS.get(name), label=label)
            axis.vlines(x + offset, low, high, color="black", linewidth=0.8)
            weight = "bold" if name == "flash3" else "normal"
            text = f" {tflops_text(value)}"
            style = {"ha": "center", "va": "bottom", "fontsize": 7, "fontweight": weight}
            style["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.3}
            axis.text(x + offset, high, text, rotation=90, **style)
    if ceiling:
        axis.axhline(
            ceiling, color="black", linestyle="--", linewidth=0.9, label="torch.mm", zorder=0
        )
    axis.set_xticks(range(len(cells)), [seqlen_title(cell["seqlen"]) for cell in cells])
    axis.set_title(title)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def draw(result: dict, mode: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = labels(result)
    panels = groups(result, mode)
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(6.8 * columns, 4.0 * lines + 0.9), sharey=True, squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (group, cells) in zip(axes.flat, panels, strict=False):
        draw_panel(axis, group_title(group), cells, names, result["ceilings"].get(group[0]))
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    axes.flat[0].set_ylim(top=axes.flat[0].get_ylim()[1] * 1.08)  # shared: room for the figures
    for axis in axes[-1]:
        axis.set_xlabel("seqlen")
    handles = {}  # label -> bar: one entry for each, though every bar is drawn alone
    for axis in axes.flat[: len(panels)]:
        handles |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    order = [label for label in [*names.values(), "torch.mm"] if label in handles]
    cell = panels[0][1][0]
    figure.suptitle(
        f"{MODE_TITLE[mode]} attention on {result['machine']['device']}: "
        f"{cell['batch'] * cell['seqlen']} tokens, hidden size {cell['heads'] * cell['head_dim']}"
    )
    figure.legend(
        [handles[label] for label in order],
        order,
        loc="lower center",
        ncols=len(order),
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot(result: dict, folder: Path, stem: str) -> list[Path]:
    """Writes STEM-MODE.png for what the result holds; returns the paths.

    Raises ImportError where matplotlib isn't installed.
    """
    paths = []
    for mode in modes_of(result):
        paths.append(folder / f"{stem}-{mode}.png")
        draw(result, mode, paths[-1])
    return paths
