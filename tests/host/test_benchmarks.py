"""The benchmarks' arithmetic, reports and command line, without a GPU."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import compare, gate, overhead, report, runner, shapes, timing
from benchmarks.__main__ import main
from benchmarks.baselines import BHSD, Implementation, find_implementations
from benchmarks.problem import make_call, make_values, to_layout
from benchmarks.shapes import Cell, grid, named_cells

TARGETS = Path(__file__).parents[2] / "benchmarks/targets/h200.json"
CPU = torch.device("cpu")
TINY = Cell("fwd", "bf16", 64, True, 128, 1, 2, 2)


def made_up_result(speed_over_target: float = 1.0) -> dict:
    """A result on the default grid: cuDNN as in the targets, flash3 at a multiple of the best."""
    targets = compare.load_targets(TARGETS)
    result = {
        "schema": 1,
        "command": "both",
        "machine": {
            "device": "NVIDIA H200",
            "device_type": "cuda",
            "torch": "2.11.0",
            "cuda": "13.0",
            "cudnn": 91900,
            "git_commit": "abc",
            "date": "2026-01-01T00:00:00",
        },
        "implementations": {
            "flash3": {"label": "flash3"},
            "cudnn": {"label": "torch SDPA cuDNN"},
            "fa2": {"label": "torch SDPA FA2"},
        },
        "missing": {"fa3": "flash_attn_interface: not installed"},
        "ceilings": {"bf16": 755.0},
        "ceiling_size": 8192,
        "cells": [],
    }
    for cell in grid(("fwd", "bwd")):
        row = targets[tuple(cell.as_dict()[key] for key in compare.CELL_KEY)]
        speeds = {name: row["tflops"][name] for name in ("cudnn", "fa2")}
        speeds["flash3"] = speed_over_target * row["best_over_cudnn"] * speeds["cudnn"]
        results = {}
        for name, tflops in speeds.items():
            ms = cell.flops / tflops * 1e-9
            results[name] = {"ms_median": ms, "ms_q1": 0.99 * ms, "ms_q3": 1.02 * ms}
            results[name] |= {"tflops": tflops, "extra_bytes": 2**20}
        result["cells"].append({**cell.as_dict(), "gate": None, "results": results})
    return result


@pytest.mark.parametrize(
    "mode, causal, expected",
    # 4 * 1 * 16 * 16384^2 * 128 = 2.199e12, by hand
    [("fwd", False, 2199023255552), ("fwd", True, 1099511627776), ("bwd", False, 5497558138880)],
)
def test_flop_count_is_the_papers(mode, causal, expected):
    assert Cell(mode, "bf16", 128, causal, 16384, 1, 16, 16).flops == expected


def test_tflops_from_milliseconds():
    cell = Cell("fwd", "bf16", 128, False, 16384, 1, 16, 16)
    assert cell.tflops(2.199023255552) == pytest.approx(1000.0)


def test_flops_of_another_head_dim_of_v():
    (square,) = grid(("bwd",), head_dims=(64,), seqlens=(512,), causals=(False,), head_dim_v=64)
    assert (
        square.flops
        == replace(square, head_dim_v=0).flops
        == 2.5 * replace(square, mode="fwd").flops
    )
    pair = replace(square, head_dim=192, head_dim_v=128)
    scores = pair.batch * pair.heads * 512 * 512
    assert pair.flops == 2 * scores * (3 * 192 + 2 * 128)
    assert replace(pair, mode="fwd", causal=True).flops == scores * (192 + 128)
    assert str(pair) == "bwd bf16 d192 v128 full 512"


def test_default_grid_is_the_targets_grid():
    targets = compare.load_targets(TARGETS)
    cells = grid(("fwd", "bwd"))
    assert len(cells) == 48
    assert all(tuple(c.as_dict()[key] for key in compare.CELL_KEY) in targets for c in cells)


@pytest.mark.parametrize(
    "wrong", [{"seqlens": [1000]}, {"head_dims": [72]}, {"group": 5}, {"seqlens": [0]}]
)
def test_grid_rejects_what_does_not_divide(wrong):
    with pytest.raises(ValueError, match="--"):
        grid(("fwd",), **wrong)


def test_quartiles():
    assert timing.quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert timing.quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_interleaving_gives_every_contender_every_round_and_a_new_first():
    order = []
    contenders = [timing.Contender(n, lambda n=n: order.append(n)) for n in "abc"]
    samples = timing.interleave(contenders, {"a": 1, "b": 1, "c": 2}, 3, CPU)
    assert "".join(order) == "abcc" + "bcca" + "ccab"
    assert {name: len(s.milliseconds) for name, s in samples.items()} == {"a": 3, "b": 3, "c": 3}
    assert samples["c"].as_dict()["calls_per_sample"] == 2


@pytest.mark.parametrize(("call_ms", "expected"), [(0.001, 50), (0.5, 6), (0.4, 8), (7.0, 1)])
def test_warm_up_chooses_enough_calls_for_a_sample(call_ms, expected, monkeypatch):
    """A made-up clock: on a busy machine a real one shows calls that do nothing as long ones."""
    monkeypatch.setattr(timing, "elapsed_ms", lambda call, calls, device: call_ms)
    contender = timing.Contender("x", lambda: None)
    assert timing.warm_up(contender, CPU, 0.001, 3.0, max_calls=50) == expected


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.1])
def test_standing_is_one_at_the_best_peers_ratio(factor):
    result = made_up_result(factor)
    found = compare.standings(result["cells"], compare.load_targets(TARGETS))
    assert all(s.value == pytest.approx(factor) for s in found)
    rows = compare.summary(found)
    assert [(r["mode"], r["shortest"], r["cells"]) for r in rows] == [
        ("fwd", 0, 24),
        ("fwd", 2048, 16),
        ("bwd", 0, 24),
        ("bwd", 2048, 16),
    ]
    assert all(r["min"] == pytest.approx(factor) == r["mean"] for r in rows)


def test_the_fastest_of_the_run_is_named_with_our_speed_over_it():
    result = made_up_result()
    cell = result["cells"][0]
    cell["results"] = {
        "flash3": {"tflops": 660.0},
        "cudnn": {"tflops": 600.0},
        "fa3": {"tflops": 660.0 / 0.9},
        "fa2": {"error": "RuntimeError: no kernel"},
    }
    assert compare.over_fastest(cell) == (pytest.approx(0.9), "fa3")
    found = compare.standings([cell], compare.load_targets(TARGETS))
    assert "0.900 (fa3)" in report.standings_table(found)
    assert compare.summary(found)[0]["measured_min"] == pytest.approx(0.9)
    del cell["results"]["flash3"]
    assert compare.over_fastest(cell) is None


def test_standing_says_why_it_is_unknown():
    result = made_up_result()
    no_peer, odd_shape, grouped = result["cells"][:3]
    no_peer["results"]["cudnn"] = {"error": "RuntimeError: no kernel"}
    odd_shape["batch"] = 3
    grouped["heads_kv"] = 1
    found = compare.standings(result["cells"], compare.load_targets(TARGETS))
    assert [s.value for s in found[:3]] == [None] * 3
    assert found[0].why == "cudnn: RuntimeError: no kernel"
    assert found[1].why == found[2].why == "no target for this shape"
    assert "cudnn: RuntimeError: no kernel" in report.standings_table(found)


def test_geometric_mean():
    assert compare.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


def test_report_has_every_table_and_names_what_is_missing():
    result = made_up_result()
    result["cells"][0]["results"]["fa2"] = {"error": "RuntimeError: no kernel"}
    found = compare.standings(result["cells"], compare.load_targets(TARGETS))
    made = report.blocks(result, found)
    assert {"fwd", "bwd", "time:fwd", "memory:bwd", "standings", "standing", "notes"} <= set(made)
    assert "fa3 (flash_attn_interface: not installed)" in made["notes"]
    assert "fa2 in 1 measurement(s): RuntimeError: no kernel" in made["notes"]
    first = next(line for line in made["fwd"].splitlines() if "d64 full: torch SDPA FA2" in line)
    assert [cell.strip() for cell in first.split("|")][2] == "n/a"
    shares = next(line for line in made["fwd"].splitlines() if "d128 causal: flash3, share" in line)
    best = 564.2 * 1.329 / 755  # cuDNN at 16k, the target over it, the ceiling
    assert f"{best:.0%}" in shares.split("|")[7]
    assert "1.00" in made["memory:bwd"]


def test_every_markdown_row_has_the_headers_columns():
    for name, block in report.blocks(made_up_result()).items():
        if name != "notes":
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_markers_are_filled_again_and_again_and_foreign_text_is_kept(tmp_path):
    readme = tmp_path / "README.md"
    foreign = "<!-- bench:x -->x<!-- /bench:x -->"
    readme.write_text(f"a\n<!-- bench:fwd -->old<!-- /bench:fwd -->\nb {foreign}\n")
    made = report.blocks(made_up_result())
    assert report.update_file(readme, made) == ["fwd"]
    once = readme.read_text()
    assert report.update_file(readme, made) == ["fwd"] and readme.read_text() == once
    assert made["fwd"] in once and "old" not in once and foreign in once
    (tmp_path / "none.md").write_text("nothing")
    with pytest.raises(ValueError, match="no <!-- bench:NAME --> marker"):
        report.update_file(tmp_path / "none.md", made)


def test_report_command_renders_a_file_without_a_gpu(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    source = tmp_path / "made-up.json"
    source.write_text(json.dumps(made_up_result()))
    readme = tmp_path / "README.md"
    readme.write_text(
        "<!-- bench:bwd -->\n<!-- /bench:bwd -->\n<!-- bench:d64:fwd -->\n<!-- /bench:d64:fwd -->\n"
    )
    command = ["report", str(source), "--compare", str(TARGETS), "--readme", str(readme)]
    assert main([*command, "--out", str(tmp_path / "out"), "--name", "h200", "--plot"]) == 0
    assert "Backward, TFLOP/s" in readme.read_text()
    assert "Forward, TFLOP/s" not in readme.read_text()
    assert main([*command, "--prefix", "d64:"]) == 0
    assert "Forward, TFLOP/s" in readme.read_text()
    for mode in ("fwd", "bwd"):
        png = tmp_path / f"out/h200-{mode}.png"
        assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000
    assert "fwd, seqlen >= 2048" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_every_implementation_here_computes_the_same(mode):
    cell = Cell(mode, "bf16", 64, True, 96, 2, 4, 2)  # 96: the gate's last block is not full
    implementations, _ = find_implementations(CPU)
    values = make_values(cell, CPU, seed=1)
    results = [runner.run_once(make_call(cell, i, values), i) for i in implementations]
    assert [i.name for i in implementations] == ["flash3", "sdpa"]
    passed = gate.check(mode, results[0], results[1], "sdpa")
    assert set(passed.share_of_bound) == set(gate.RESULTS[mode])


def test_inputs_are_contiguous_in_each_layout():
    q = make_values(TINY, CPU, seed=0)["q"]
    assert to_layout(q, BHSD).shape == (1, 2, 128, 64) and to_layout(q, BHSD).is_contiguous()


@pytest.mark.parametrize("fault", ["one tile", "nan", "scale"])
def test_gate_refuses_a_wrong_result(fault):
    right = make_values(Cell("fwd", "bf16", 64, False, 4096, 1, 4, 4), CPU, seed=0)["q"]
    wrong = right.clone()
    if fault == "one tile":
        wrong[0, 1024:1088, 2] = 0
    elif fault == "nan":
        wrong[0, 4095, 3, 63] = float("nan")
    else:
        wrong *= 1.05
    with pytest.raises(gate.WrongResult, match="out differs from cudnn"):
        gate.check("fwd", (wrong,), (right,), "cudnn")


def test_a_wrong_kernel_and_a_raising_baseline_are_reported_not_timed():
    implementations, _ = find_implementations(CPU)
    by_name = {i.name: i for i in implementations}

    def wrong(q, k, v, causal):
        return q

    def raising(q, k, v, causal):
        raise RuntimeError("no kernel for this shape\nwith a long explanation")

    def replaced(name, forward):
        fields = {**by_name["flash3"].__dict__, "name": name, "forward": forward}
        return type(by_name["flash3"])(**fields)

    contestants = [replaced("flash3", wrong), by_name["sdpa"], replaced("fa4", raising)]
    quick = runner.Settings(rounds=2, warmup_s=0.0, sample_ms=0.1)
    results = runner.measure_cell(TINY, contestants, quick, CPU)["results"]
    assert list(results) == ["flash3", "sdpa", "fa4"]
    assert results["flash3"]["error"].startswith("WrongResult: out differs from sdpa")
    assert results["fa4"] == {"error": "RuntimeError: no kernel for this shape"}
    assert results["sdpa"]["samples"] == 2


class ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q):
        return q.clone()

    @staticmethod
    def backward(ctx, dout):
        raise RuntimeError("this build has no backward")


def test_a_forward_only_implementation_has_its_forward_overhead():
    forward_only = Implementation(
        "fa3", "fa3", BHSD, lambda q, k, v, causal: ForwardOnly.apply(q), "1"
    )
    results = overhead.measure_overhead([forward_only], "bf16", 64, CPU, rounds=2)["results"]
    assert results["fa3"]["error"] == "RuntimeError: this build has no backward"
    assert results["fa3"]["forward"]["us_median"] > 0
    assert set(results["fa3"]) == {"error", "forward", "recording"}


def test_tiny_run_on_cpu_end_to_end(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    command = "both --device cpu --seqlens 32,64 --head-dims 64 --tokens 64 --hidden 128 --group 2"
    command += " --causal causal --rounds 2 --warmup 0 --sample-ms 0.1 --rotate 2 --overhead --plot"
    assert main([*command.split(), "--out", str(tmp_path), "--compare", str(TARGETS)]) == 0
    result = json.loads((tmp_path / "both-bf16.json").read_text())
    assert [(c["mode"], c["seqlen"]) for c in result["cells"]] == [
        ("fwd", 32), ("fwd", 64), ("bwd", 32), ("bwd", 64)
    ]  # fmt: skip
    for cell in result["cells"]:
        assert cell["gate"]["reference"] == "sdpa"
        assert all(timed["ms_median"] > 0 for timed in cell["results"].values())
    assert set(result["missing"]) == {"cudnn", "fa2", "flash_attn", "fa3", "fa4"}
    assert set(result["overhead"]["results"]["flash3"]) == {"forward", "recording", "backward"}
    printed = capsys.readouterr().out
    for name in result["missing"]:
        assert f"Not measured: {name} (needs a CUDA device" in printed
    assert re.search(r"Host time per call, µs.*flash3", printed)
    assert (tmp_path / "both-bf16-bwd.png").exists() and (tmp_path / "both-bf16.md").exists()


def test_named_shapes_are_legal_and_counted_by_their_own_lengths():
    cells = named_cells("fwd")
    assert len({cell.name for cell in cells}) == len(cells) == len(named_cells("bwd"))
    for cell in cells:
        assert cell.heads % cell.heads_kv == 0 and (not cell.causal or cell.keys == cell.seqlen)
    (cross,) = named_cells("fwd", match="cross-attention")
    assert cross.flops == 4 * 4 * 16 * 4096 * 512 * 128
    values = make_values(cross, CPU, seed=0)
    assert values["q"].shape == values["dout"].shape == (4, 4096, 16, 128)
    assert values["k"].shape == values["v"].shape == (4, 512, 16, 128)


def test_shapes_command_end_to_end(tmp_path, capsys, monkeypatch):
    people = [
        ("some queries", 1, 4, 2, 64, "full", 5, 70),
        ("a prompt", 1, 2, 2, 64, "causal", 33, 33),
    ]
    monkeypatch.setattr(shapes, "NAMED", people)
    quick = "--device cpu --rounds 2 --warmup 0 --sample-ms 0.1"
    assert main(["shapes", *quick.split(), "--out", str(tmp_path), "--name", "x"]) == 0
    table = (tmp_path / "x.md").read_text()
    assert re.search(r"\| some queries +\|.*\(sdpa\) \|", table)
    assert re.search(r"\| a prompt +\|.*\(sdpa\) \|", table)
    assert main(["shapes", *quick.split(), "--match", "nothing like it"]) == 2
    assert "'nothing like it' is found in no shape's name" in capsys.readouterr().err


def test_bad_arguments_give_one_line_and_status_2(capsys):
    assert main(["fwd", "--device", "cpu", "--seqlens", "100"]) == 2
    assert capsys.readouterr().err == "error: --tokens 16384 is not a multiple of seqlen 100\n"
