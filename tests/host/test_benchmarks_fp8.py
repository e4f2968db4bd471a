"""The float8 benchmark without a GPU: one cell on the CPU, its report, standings against the targets."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import compare, fp8, fp8_growth
from benchmarks.__main__ import main
from benchmarks.runner import Settings
from benchmarks.shapes import Cell, grid

pytest.importorskip("tqdm")
TARGETS = Path(fp8.__file__).parent / "targets" / "h200.json"
CPU = torch.device("cpu")
QUICK = Settings(rounds=1, warmup_s=0.0, sample_ms=0.0)
TINY = Cell("fwd", "bf16", 32, True, 150, 1, 2, 1)


def made_up_result(share):
    """Every cell of the targets at ``share`` of the best peer's share of the ceiling."""
    targets = compare.load_targets(TARGETS)
    cells = []
    for cell in grid(("fwd",), "bf16", (64, 128, 256)):
        key = "fwd", "e4m3", cell.head_dim, cell.causal, cell.seqlen, cell.batch, cell.heads
        tflops = share * 1000 * targets[key]["best_over_fp8_mm"]
        results = {"fp8": {"tflops": tflops, "relative_error": 0.045}}
        cells.append({**cell.as_dict(), "results": results})
    ceilings = {"fp8": 1000.0, "copy_TBps": 4.0}
    return {"cells": cells, "ceilings": ceilings, "ceiling_size": 8192}, targets


def test_a_cell_has_speed_and_error_of_each_way():
    entry = fp8.measure_cell(TINY, QUICK, CPU)
    assert list(entry["results"]) == list(fp8.NAMES)
    for name in ("fp8", "fp8_natural", "fp8_call", "flash3"):
        timed = entry["results"][name]
        assert timed["tflops"] > 0
        assert timed["relative_error"] < (0.01 if name == "flash3" else 0.08)
    assert entry["results"]["quantize"]["tbps"] > 0
    text = fp8.render(
        {"cells": [entry], "ceilings": {"fp8": 1.0, "copy_TBps": 1.0}, "ceiling_size": 8}, []
    )
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1 and "d32, causal" in text and "150" in text


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    make_calls = fp8.make_calls

    def with_a_fault(cell, values):
        calls = make_calls(cell, values)
        return {**calls, "fp8_natural": lambda: calls["fp8_natural"]().flip(1)}

    monkeypatch.setattr(fp8, "make_calls", with_a_fault)
    results = fp8.measure_cell(TINY, QUICK, CPU)["results"]
    assert "not timed" in results["fp8_natural"]["error"] and "tflops" not in results["fp8_natural"]
    assert "tflops" in results["fp8"]
    assert fp8.failed({"cells": [{"results": results}]})


def test_the_ceiling_is_the_median_of_three_times(monkeypatch):
    """Before the cells, half way and after them."""
    ran, speeds = [], iter([1500.0, 1390.0, 1410.0])
    monkeypatch.setattr(
        fp8, "scaled_mm_ceiling", lambda *_: (ran.append("product"), next(speeds))[1]
    )
    monkeypatch.setattr(fp8, "copy_bandwidth", lambda *_: 4.0)
    monkeypatch.setattr(fp8, "measure_cell", lambda *_: ran.append("cell"))
    result = {"ceilings": {}, "cells": []}
    fp8.measure([TINY] * 3, QUICK, CPU, result)
    assert ran == ["product", "cell", "cell", "product", "cell", "product"]
    assert result["ceilings"] == {
        "fp8": 1410.0, "fp8_measured": [1500.0, 1390.0, 1410.0], "copy_TBps": 4.0
    }  # fmt: skip


@pytest.mark.parametrize("share", [1.0, 1.25])
def test_standings_are_shares_of_the_ceiling_over_the_best_peers(share):
    result, targets = made_up_result(share)
    found = fp8.standings(result, targets)
    assert len(found) == 36 and all(s.value == pytest.approx(share) for s in found)
    assert f"geometric mean {share:.2f}" in fp8.render(result, found)


def test_a_shape_without_target_has_no_standing():
    result, targets = made_up_result(1.0)
    result["cells"] = [{**result["cells"][0], "seqlen": 100}, {**result["cells"][1], "heads_kv": 1}]
    assert [s.value for s in fp8.standings(result, targets)] == [None, None]


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    result, _ = made_up_result(1.0)
    fp8.plot(json.loads(json.dumps(result)), tmp_path / "fp8.png")
    assert (tmp_path / "fp8.png").stat().st_size > 10_000


def test_the_command_needs_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    assert main(["fp8"]) == 2
    assert "GPU" in capsys.readouterr().err


def test_report_fills_a_readme(tmp_path):
    result, _ = made_up_result(1.25)
    stored, readme = tmp_path / "fp8.json", tmp_path / "README.md"
    stored.write_text(json.dumps({**result, "command": "fp8"}))
    readme.write_text("<!-- bench:fp8 -->\n<!-- /bench:fp8 -->\n")
    assert main(["report", str(stored), "--compare", str(TARGETS), "--readme", str(readme)]) == 0
    lines = readme.read_text().splitlines()
    assert {line.count("|") for line in lines if line.startswith("|")} == {8}
    standings = [line for line in lines if "d256 causal: standing" in line]
    assert len(standings) == 1 and standings[0].count("1.25") == 6
    assert any("d64 full: our bfloat16" in line and "n/a" in line for line in lines)
    assert main(["report", str(stored), "--out", str(tmp_path)]) == 2


def test_growth_of_the_error(tmp_path, capsys):
    arguments = ["--head-dims", "16,144", "--keys", "64,256", "--device", "cpu"]
    assert fp8_growth.main([*arguments, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "fp8-growth.json").read_text())["rows"]
    assert all(0.01 < row["error"] < 0.1 for row in rows)
    ways = [(row["head_dim"], row["promote_every"]) for row in rows]
    assert ways == [(16, 0), (16, 1)] * 2 + [(144, 0)] * 2
    text = (tmp_path / "fp8-growth.md").read_text()
    assert "d16, two levels" in text and "d144, two levels" not in text
    assert text.strip() in capsys.readouterr().out
