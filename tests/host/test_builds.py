"""`python -m benchmarks builds` without a GPU: stub kernels on CPU memory behind the real shim and plan.cpp."""

import json
import math
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from variants import generate, limits
from variants.table import all_rows

from benchmarks import __main__ as benchmarks_main
from benchmarks import compare
from benchmarks.builds import check, command, library, measure, report
from benchmarks.builds.call import prepare
from benchmarks.shapes import Cell, grid
from benchmarks.timing import Samples
from build_tools import flags, kernels, toolchain

ROOT = Path(__file__).parents[2]
TARGETS = ROOT / "benchmarks/targets/h200.json"
STUB = Path(__file__).with_name("stub_kernel.cpp")
CPU = torch.device("cpu")
ROWS = {row.name: row for row in all_rows()}
FULL = ROWS["fwd_bf16_hd64_full"]
CAUSAL = ROWS["fwd_bf16_hd64_causal"]
TAGGED = replace(FULL, m=128, n=64, mma_warpgroups=2, tag="n64")
BWD = ROWS["bwd_bf16_hd64_causal"]
SHAPES = (
    check.Shape(1, 70, 45, 4, 2),
    check.Shape(2, 33, 65, 3, 1, narrower=24),
    check.Shape(1, 2, 1, 1, 1),
)
TOOLKIT = toolchain.find_toolkit()
needs_compiler = pytest.mark.skipif(
    TOOLKIT is None or shutil.which("g++") is None, reason="needs g++ and the CUDA headers"
)


def make_folder(folder: Path, faults: dict) -> Path:
    """A folder as build_tools/kernels.py leaves it, of stubs: row -> FAULT of stub_kernel.cpp."""
    generate.generate(list(faults), folder / "generated")
    for row, fault in faults.items():
        defines = [f"-DLAUNCH=launch_{row.name}", f"-DFAULT={fault}"]
        defines += ["-DBACKWARD"] if row.name.startswith("bwd") else []
        includes = [f"-I{ROOT / 'csrc/launch'}", f"-I{TOOLKIT.home / 'include'}"]
        out = folder / f"{row.name}.o"
        subprocess.run(
            ["g++", "-std=c++20", "-O2", "-fPIC", *defines, *includes, "-c", STUB, "-o", out],
            check=True,
        )
        out.with_suffix(".d").write_text(f"{out} : {STUB} {ROOT / 'csrc/launch/params.h'}\n")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("folders")
    return [
        make_folder(top / "base", {FULL: 0, BWD: 0}),
        make_folder(top / "tiles", {FULL: 0, TAGGED: 0, CAUSAL: 1, BWD: 1}),
    ]


@pytest.fixture(scope="module")
def libraries(folders, tmp_path_factory):
    return library.load(
        library.find_builds(folders, None), TOOLKIT, tmp_path_factory.mktemp("libraries")
    )


@pytest.fixture
def small_shapes(monkeypatch):
    monkeypatch.setattr(check, "SHAPES", SHAPES)


def arguments(*words):
    return benchmarks_main.parse(["builds", *map(str, words)])


@needs_compiler
def test_rows_and_keys_come_from_the_table(libraries):
    base, tiles = libraries
    assert [base.name(row) for row in base.rows] == [f"base:{FULL.name}", f"base:{BWD.name}"]
    assert [row.name for row in tiles.rows][1] == f"{FULL.name}_n64"
    first, tagged, causal, backward = tiles.rows
    assert (first.mode, first.dtype, first.head_dim, first.causal) == ("fwd", "bf16", 64, False)
    assert (tagged.tile, tagged.causal, tagged.why) == ("128x64", False, FULL.why)
    assert causal.causal and (backward.mode, backward.index) == ("bwd", 0)


@needs_compiler
def test_only_the_interface_is_exported(folders, tmp_path):
    """An inline variable of two builds would be one if the dynamic linker saw it."""
    (build,) = library.find_builds(folders[:1], None)
    path = library.link(build, TOOLKIT, tmp_path)
    listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True)
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert names and all(name.startswith("flash3_builds_") for name in names)


@needs_compiler
def test_rows_that_are_right_and_rows_that_are_not(libraries, small_shapes):
    lines = []
    checks = {c.name: c for c in check.check_rows(libraries, ("fwd", "bwd"), CPU, lines.append)}
    right = [f"base:{FULL.name}", f"base:{BWD.name}", f"tiles:{FULL.name}", f"tiles:{TAGGED.name}"]
    for name in right:
        assert checks[name].fault is None
        assert max(checks[name].shares.values()) < 0.5
    assert set(checks[f"base:{FULL.name}"].shares) == {"out", "lse"}
    results = ("dq", "dk", "dv")
    assert set(checks[f"base:{BWD.name}"].shares) == {
        f"{name}{how}" for name in results for how in ("", " deterministic", " repeated")
    }  # fmt: skip
    # What is never written stays NaN: infinitely many times the bound.
    assert checks[f"tiles:{CAUSAL.name}"].fault.startswith("b1 sq70 sk45 h4/2: out inf, lse inf")
    fault = checks[f"tiles:{BWD.name}"].fault
    assert "dk inf" in fault and "dv deterministic inf" in fault and "dq inf" not in fault
    place = lines.index(f"check tiles:{CAUSAL.name} ({CAUSAL.m}x{CAUSAL.n})")
    assert lines[place + 1].startswith("  WRONG: ")


@needs_compiler
def test_row_that_raises_is_wrong_and_the_others_go_on(tmp_path, small_shapes):
    folder = make_folder(tmp_path / "raising", {FULL: 2, CAUSAL: 0})
    builds = library.find_builds([folder], [ROOT])
    (loaded,) = library.load(builds, TOOLKIT, tmp_path)
    raising, right = check.check_rows([loaded], ("fwd",), CPU, lambda line: None)
    assert raising.fault == "RuntimeError: the stub does not run"
    assert right.fault is None


@needs_compiler
def test_workspace_is_what_the_plan_of_the_tree_says(libraries):
    values, _ = check.make_problem(libraries[0].rows[1], check.Shape(2, 70, 45, 4, 2, 24), CPU)
    call = prepare(libraries[0], libraries[0].rows[1], values)
    rows = 2 * 4 * 128  # 70 queries rounded up
    assert call.workspace.numel() == rows * (64 * 4 + 8)
    deterministic = prepare(libraries[0], libraries[0].rows[1], values, deterministic=True)
    assert deterministic.workspace.numel() == rows * (64 * 4 + 8) + 256


@needs_compiler
def test_errors_of_a_call_are_exceptions(libraries):
    forward, _ = libraries[0].rows
    wide = replace(forward, head_dim=128, head_dim_v=128)
    values, _ = check.make_problem(wide, check.Shape(1, 8, 8, 1, 1), CPU)
    with pytest.raises(RuntimeError, match="row of head_dim 64 cannot serve head_dim 128"):
        prepare(libraries[0], forward, values)
    values, _ = check.make_problem(forward, check.Shape(1, 8, 8, 2, 2), CPU)
    with pytest.raises(RuntimeError, match="no row 7 among 1"):
        prepare(libraries[0], replace(forward, index=7), values)
    with pytest.raises(ValueError, match="k is not contiguous"):
        prepare(libraries[0], forward, {**values, "k": values["k"].transpose(1, 2)})


@needs_compiler
def test_command_end_to_end(folders, tmp_path, capsys, small_shapes):
    out = tmp_path / "results" / "tiles.json"
    grid = "--seqlens 32,64 --head-dims 64 --tokens 64 --hidden 128 --group 2"
    quick = "--rounds 3 --warmup 0 --sample-ms 0.1"
    args = arguments(*folders, *grid.split(), *quick.split(), "--out", out, "--compare", TARGETS)
    assert command.main(args, CPU) == 1  # two rows of the second build are wrong
    result = json.loads(out.read_text())
    assert [(c["mode"], c["causal"], c["seqlen"]) for c in result["cells"]] == [
        ("fwd", False, 32), ("fwd", False, 64), ("bwd", True, 32), ("bwd", True, 64)
    ]  # fmt: skip
    names = [f"base:{FULL.name}", f"tiles:{FULL.name}", f"tiles:{TAGGED.name}"]
    assert list(result["cells"][0]["results"]) == ["sdpa", *names]
    assert list(result["cells"][2]["results"]) == ["sdpa", f"base:{BWD.name}"]
    for cell in result["cells"]:
        assert all(timed["ms_median"] > 0 for timed in cell["results"].values())
    assert result["cells"][0]["results"][names[0]]["over_first"]["median"] == 1.0
    assert [build["tree"] for build in result["builds"]] == [str(ROOT)] * 2
    printed = capsys.readouterr().out
    assert f"base: 2 rows of {folders[0]}, sources {ROOT}" in printed
    assert "4 of 6 rows are right" in printed
    assert f"WRONG, not timed: tiles:{CAUSAL.name}: b1 sq70" in printed
    assert f"{TAGGED.name} 128x64" in printed


@needs_compiler
def test_check_only_times_nothing(folders, capsys, small_shapes):
    assert command.main(arguments(folders[0], "--check-only"), CPU) == 0
    assert "2 of 2 rows are right" in capsys.readouterr().out
    args = arguments(folders[1], "--check-only", "--mode", "fwd")
    assert command.main(args, CPU) == 1


@needs_compiler
def test_folder_that_does_not_link_gives_the_linkers_words(tmp_path, capsys):
    folder = make_folder(tmp_path / "half", {FULL: 0})
    generate.generate([FULL, CAUSAL], folder / "generated")
    assert command.main(arguments(folder), CPU) == 2
    assert f"objects are absent: {CAUSAL.name}.o" in capsys.readouterr().err
    (folder / f"{CAUSAL.name}.o").symlink_to(folder / f"{FULL.name}.o")
    assert command.main(arguments(folder), CPU) == 2
    assert f"undefined reference to `flash3::launch_{CAUSAL.name}" in capsys.readouterr().err


def test_trees_and_labels(tmp_path):
    made = [tmp_path / "a" / "k", tmp_path / "b" / "k", tmp_path / "c"]
    for folder in made:
        folder.mkdir(parents=True)
    tree = tmp_path / "tree"
    header = tree / "csrc" / "launch" / "params.h"
    header.parent.mkdir(parents=True)
    header.write_text("")
    (made[0] / "x.d").write_text(f"x.o : x.cu {header}\n")
    (made[1] / "x.d").write_text("x.o : x.cu /gone/csrc/launch/params.h\n")
    builds = library.find_builds(made, None)
    assert [build.label for build in builds] == [str(made[0]), str(made[1]), "c"]
    assert [build.tree for build in builds] == [tree, flags.ROOT, flags.ROOT]
    assert {build.tree for build in library.find_builds(made, [tree])} == {tree}
    with pytest.raises(ValueError, match="2 trees for 3 folders"):
        library.find_builds(made, [tree, tree])
    with pytest.raises(ValueError, match="given twice"):
        library.find_builds([made[2], made[2]], None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "generated/tables.cpp is not there"),
        (["nowhere", "--tree", "elsewhere"], "csrc/launch/plan.cpp is not there"),
        (["nowhere", "--tree", "a,b"], "2 trees for 1 folders"),
        (["nowhere", "--seqlens", "100"], "not a multiple of seqlen 100"),
        (["nowhere", "--compare", "no.json"], "no.json"),
    ],
)
def test_bad_arguments_give_one_line_and_status_2(words, message, capsys, monkeypatch):
    monkeypatch.setattr(
        toolchain, "find_toolkit", lambda: toolchain.Toolkit(Path("/cuda"), Path("/nvcc"), (13, 0))
    )
    assert command.main(arguments(*words), CPU) == 2
    assert message in capsys.readouterr().err


def test_without_a_toolkit_or_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(toolchain, "find_toolkit", lambda: None)
    assert command.main(arguments("nowhere"), CPU) == 2
    assert "no CUDA toolkit was found" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmarks_main.main(["builds", "nowhere"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


def test_trees_own_shim_is_preferred(tmp_path):
    toolkit = toolchain.Toolkit(Path("/cuda"), Path("/nvcc"), (13, 0))
    folder, tree = tmp_path / "k", tmp_path / "tree"
    generate.generate([FULL], folder / "generated")
    (folder / f"{FULL.name}.o").write_text("")
    (tree / "csrc/launch").mkdir(parents=True)
    (tree / "csrc/launch/plan.cpp").write_text("")
    build = library.Build("k", folder, tree)
    command = library.link_command(build, toolkit, tmp_path / "exports", tmp_path / "out.so")
    assert str(ROOT / library.SHIM) in command and f"-I{tree / 'csrc/launch'}" in command
    assert "-lcudart_static" in command and "-lcuda" not in command
    (tree / library.SHIM).parent.mkdir(parents=True)
    (tree / library.SHIM).write_text("")
    command = library.link_command(build, toolkit, tmp_path / "exports", tmp_path / "out.so")
    assert str(tree / library.SHIM) in command and str(ROOT / library.SHIM) not in command


def test_share_of_bound():
    right = torch.randn(2, 130, 3, 64, dtype=torch.float64)
    rounded = right.to(torch.bfloat16)
    assert 0 < check.share_of_bound("out", rounded, right) < 0.2
    assert check.share_of_bound("out", rounded * 1.05, right) > 1
    one_tile = rounded.clone()
    one_tile[1, 64:128, 2] = 0
    assert check.share_of_bound("out", one_tile, right) > 1
    rounded[0, 129, 0, 5] = math.nan
    assert check.share_of_bound("out", rounded, right) == math.inf
    # A gradient that is 0: rounding noise passes, a value does not.
    zero = torch.zeros(1, 2, 1, 64, dtype=torch.float64)
    noise = torch.full_like(zero, 1e-6).to(torch.float16)
    assert check.share_of_bound("dq", noise, zero) < 0.5
    assert check.share_of_bound("dq", (noise.double() + 1e-3).to(torch.float16), zero) > 1


def test_share_of_bound_of_lse():
    right = torch.tensor([[[-math.inf, 2.0, 7.0]]], dtype=torch.float64)
    assert check.share_of_bound("lse", right.float(), right) < 0.1
    assert check.share_of_bound("lse", right.float() + 1e-2, right) > 1
    for wrong in ([0.0, 2.0, 7.0], [-math.inf, -math.inf, 7.0], [-math.inf, 2.0, math.nan]):
        assert check.share_of_bound("lse", torch.tensor([[wrong]]), right) == math.inf


def test_ratios_are_taken_round_by_round():
    samples = {"a": Samples([2.0, 4.0, 6.0], 1), "b": Samples([1.0, 2.0, 4.0], 1)}
    ratios = measure.over_first(samples, ["a", "b"])
    assert ratios["a"] == {"q1": 1.0, "median": 1.0, "q3": 1.0}
    assert ratios["b"] == {"q1": 1.75, "median": 2.0, "q3": 2.0}


def made_up_result() -> dict:
    """Two builds on the forward of the default grid: at the best peer's speed, and 10 % above it."""
    targets = compare.load_targets(TARGETS)
    names = {f"base:{FULL.name}": 1.0, f"tiles:{FULL.name}_n64": 1.1}
    cells = []
    for cell in grid(("fwd",), head_dims=(64,), causals=(False,)):
        target = targets[tuple(cell.as_dict()[key] for key in compare.CELL_KEY)]
        cudnn = target["tflops"]["cudnn"]
        results = {"cudnn": {"tflops": cudnn, "ms_median": 1.0, "ms_q1": 1.0, "ms_q3": 1.0}}
        for name, factor in names.items():
            results[name] = {
                "tflops": factor * target["best_over_cudnn"] * cudnn,
                "ms_median": 1.0,
                "ms_q1": 0.99,
                "ms_q3": 1.01,
                "over_first": {"q1": factor - 0.01, "median": factor, "q3": factor + 0.01},
            }
        cells.append({**cell.as_dict(), "results": results})
    cells[-1]["results"][f"tiles:{FULL.name}_n64"] = {"error": "WrongResult: out differs"}
    machine = {"device": "NVIDIA H200", "torch": "2.11.0", "cuda": "13.0", "cudnn": 91900}
    return {
        "machine": {**machine, "git_commit": "abc", "date": "2026-01-01T00:00:00"},
        "implementations": {"cudnn": {"label": "torch SDPA cuDNN"}},
        "tiles": dict(zip(names, ("192x128", "128x64"), strict=True)),
        "missing": {},
        "ceilings": {},
        "checks": [
            {"name": name, "shares": {"out": 0.1}, "fault": None} for name in names
        ] + [{"name": "tiles:x", "shares": {}, "fault": "b1: out inf times the bound"}],
        "cells": cells,
    }  # fmt: skip


def test_report_has_speed_ratio_and_standing():
    result = made_up_result()
    text = report.render(result, compare.load_targets(TARGETS))
    assert "2 of 3 rows are right" in text
    assert "WRONG, not timed: tiles:x: b1: out inf times the bound" in text
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in text.splitlines()
        if line.startswith(f"| tiles:{FULL.name}_n64 128x64")
    ]
    speed, ratio, standing = rows
    assert speed[1].endswith("(2.0%)") and speed[-1] == "n/a"
    assert ratio[1:] == ["1.100 (±0.010)"] * 5 + ["n/a"]
    assert standing[1:] == ["1.100"] * 5 + ["n/a"]
    assert text.count("bf16 d64 full: torch SDPA cuDNN") == 1
    assert "standing" not in report.render(result)
    assert "1 measurement(s): WrongResult: out differs" in text


def test_a_row_of_a_larger_head_dim_serves_a_cell_and_a_wrong_one_does_not():
    def row(name, head_dim, v=None):
        return library.Row("fwd", 0, name, "bf16", head_dim, v or head_dim, False, "1x1", "")

    class Loaded:
        rows = (row("a64", 64), row("b64", 64), row("c128", 128), row("d128", 192, 128))

        def name(self, row):
            return row.name

    def names(head_dim, wrong=(), v=0):
        cell = Cell("fwd", "bf16", head_dim, False, 64, 1, 2, 2, head_dim_v=v)
        return list(measure.rows_for(cell, [Loaded()], wrong))

    assert names(64) == names(40) == ["a64", "b64"]
    assert names(96) == ["c128"]
    assert names(64, {"a64"}) == ["b64"]
    assert names(64, v=72) == ["c128"] and names(192, v=128) == ["d128"]
    assert names(192) == []


def test_experiments_table_has_tiles_of_one_key(tmp_path):
    file = tmp_path / "tiles.py"
    file.write_text(
        "from dataclasses import replace\n"
        "from variants.table import all_rows\n"
        "BASE = next(row for row in all_rows() if row.name == 'fwd_bf16_hd64_full')\n"
        "ROWS = [BASE, replace(BASE, m=128, n=64, mma_warpgroups=2, tag='n64')]\n"
    )
    rows = kernels.choose_rows(None, file)
    assert [row.name for row in rows] == [FULL.name, f"{FULL.name}_n64"]
    assert kernels.choose_rows("n64", file) == [TAGGED]
    generate.generate(rows, tmp_path)
    text = (tmp_path / "tables.cpp").read_text()
    assert text.count("{DType::kBF16, 64, 64, MaskKind::kFull}") == 2 and ".tag" not in text
    assert f"launch_fwd<{TAGGED.name}>" in (tmp_path / f"{TAGGED.name}.cu").read_text()
    file.write_text("")
    with pytest.raises(ValueError, match="defines no ROWS"):
        kernels.choose_rows(None, file)


def test_shipped_table_has_one_row_for_a_key_and_tile():
    with pytest.raises(limits.LimitError, match=f"{FULL.name} 192 x 128: 2 rows have this key"):
        limits.check([*all_rows(), replace(FULL, tag="again")])
    limits.check([FULL, TAGGED], one_row_per_key=False)
    with pytest.raises(limits.LimitError, match=f"{TAGGED.name}: 2 rows have this name"):
        limits.check([TAGGED, TAGGED], one_row_per_key=False)
    with pytest.raises(limits.LimitError, match="tag 'a-b' is no part of a name"):
        limits.check([replace(FULL, tag="a-b")])
