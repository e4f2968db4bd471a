"""python -m flash3.doctor: the report is always complete, and the exit status is right."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import flash3
from flash3 import doctor, selfcheck

PROBES = ["flash3", "torch", "driver", "GPU", "kernels", "CPU path", "GPU path"]
H200 = ("NVIDIA H200", (9, 0), 132, 150_000_000_000)
A100 = ("NVIDIA A100", (8, 0), 108, 80_000_000_000)

TILE = {"m": 192, "n": 128, "kv_stages": 2}
ROW = {
    "name": "fwd_bf16_hd64_causal",
    "pass": "fwd",
    "dtype": "bf16",
    "head_dim": 64,
    "head_dim_v": 64,
    "mask": "causal",
    "layout": "dense",
    "tile": TILE,
}


def fake_plan(pass_, dtype, mask, *rest):
    if pass_ == "bwd":
        raise RuntimeError("no backward kernel for dtype bf16")
    return {
        "row": ROW["name"],
        "tile": TILE,
        "grid": 132,
        "workspace_bytes": 4,
        "why": f"because {rest}",
    }


KERNELS = SimpleNamespace(
    build_info=lambda: {"cuda_version": "13.0"},
    variants=lambda: [{**ROW, "tile": TILE, "why": "E001"}],
    plan=fake_plan,
)


@pytest.fixture
def machine(monkeypatch):
    """A machine whose GPUs and kernels are set by the test: machine(gpus=[...], kernels=module or None)."""

    def set_up(gpus=(), kernels=None):
        def load():
            if kernels is None:
                raise ModuleNotFoundError("the kernels are not built; build them", name="flash3._C")
            return kernels

        monkeypatch.setattr(doctor, "visible_gpus", lambda: list(gpus))
        monkeypatch.setattr(doctor, "load_kernels", load)

    return set_up


def report(capsys):
    status = doctor.main(["--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] == (status == 0)
    return status, {probe["name"]: probe for probe in answer["probes"]}


def test_a_machine_without_gpu_and_kernels_is_well(machine, capsys):
    machine()
    status, probes = report(capsys)
    assert status == 0
    assert list(probes) == PROBES
    assert probes["CPU path"]["status"] == "ok"
    assert probes["kernels"]["status"] == probes["GPU path"]["status"] == "skip"


def test_the_text_report_shows_every_probe_and_the_errors(machine, capsys):
    machine()
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in PROBES)
    assert "float32 causal: error out" in text
    assert "All that should work here does." in text


def test_a_hopper_gpu_without_kernels_is_not_well(machine, capsys):
    machine(gpus=[A100, H200])
    status, probes = report(capsys)
    assert status == 1
    assert probes["GPU"]["status"] == "ok"
    assert probes["kernels"]["status"] == "fail"
    assert "build" in probes["kernels"]["headline"]


def test_another_gpu_is_named_with_its_capability(machine, capsys):
    machine(gpus=[A100])
    status, probes = report(capsys)
    assert status == 0
    assert probes["GPU"]["status"] == "skip"
    assert "NVIDIA A100, compute capability 8.0" in probes["GPU"]["details"][0]


def test_kernels_are_listed_with_tile_and_experiment(machine, capsys):
    machine(kernels=KERNELS)
    _, probes = report(capsys)
    assert probes["kernels"]["status"] == "ok"
    assert "fwd_bf16_hd64_causal: tile 192x128, kv_stages 2 (E001)" in probes["kernels"]["details"]


def test_a_probe_that_raises_leaves_the_rest_of_the_report(machine, capsys, monkeypatch):
    machine()

    def broken():
        raise OSError("the cable is out")

    monkeypatch.setattr(doctor, "probe_driver", broken)
    status, probes = report(capsys)
    assert status == 1
    assert list(probes) == PROBES
    assert probes["driver"] == {
        "name": "driver",
        "status": "fail",
        "headline": "OSError: the cable is out",
        "details": [],
    }


def test_wrong_results_are_not_well(machine, capsys, monkeypatch):
    machine()
    right = flash3.flash_attn_func
    monkeypatch.setattr(flash3, "flash_attn_func", lambda *a, **k: right(*a, **k) * 1.001)
    status, probes = report(capsys)
    assert status == 1
    assert probes["CPU path"]["status"] == "fail"
    assert "WRONG" in probes["CPU path"]["details"][0]


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("mask", ["full", "causal", "local"])
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_the_check_of_a_row_accepts_right_results(pass_, dtype, mask, layout):
    """On CPU the same ops run the reference in the same dtype."""
    row = {**ROW, "pass": pass_, "dtype": dtype, "mask": mask, "layout": layout}
    good, line = selfcheck.check_row(row, torch.device("cpu"))
    assert good, line


def test_the_check_of_a_row_refuses_a_wrong_mask(monkeypatch):
    right = selfcheck.reference.attention_forward
    monkeypatch.setattr(
        selfcheck.reference,
        "attention_forward",
        lambda q, k, v, s, causal: right(q, k, v, s, not causal),
    )
    problem = selfcheck.Problem.draw(torch.bfloat16, 64, "causal")
    error = selfcheck.relative_error(
        right(*problem.inputs, problem.scale, True)[0], problem.forward()[0]
    )
    assert error > 10 * selfcheck.TOLERANCE[torch.bfloat16]


def test_nan_is_never_within_the_tolerance():
    bad = torch.tensor([1.0, float("nan")])
    error = selfcheck.relative_error(bad, torch.ones(2))
    assert not selfcheck.judge("x", {"out": error}, 1.0)[0]


def test_a_row_that_raises_is_reported_and_not_fatal():
    good, line = selfcheck.check_row({**ROW, "dtype": "e5m2"}, torch.device("cpu"))
    assert not good
    assert "fwd_bf16_hd64_causal: KeyError" in line


def test_plan_prints_row_grid_workspace_and_why_and_says_that_sms_are_assumed(machine, capsys):
    machine(kernels=KERNELS)
    words = ["b=2", "hq=32", "hkv=8", "sq=1024", "sk=8192", "hd=64", "causal", "dtype=bf16", "fwd"]
    assert doctor.main(["--plan", *words]) == 0
    text = capsys.readouterr().out
    assert "fwd_bf16_hd64_causal" in text
    assert "192x128" in text
    assert "132 CTAs on 132 SMs (assumed: no Hopper GPU is visible)" in text
    assert "4 bytes" in text
    assert "because (2, 1024, 8192, 32, 8, 64, 132, False, 'dense', 64)" in text


def test_plan_uses_the_sms_of_a_visible_hopper_gpu(machine, capsys):
    machine(kernels=KERNELS, gpus=[A100, ("NVIDIA GH200", (9, 0), 114, 1)])
    assert doctor.main(["--json", "--plan", "fwd", "sq=128"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert (plan["num_sms"], plan["num_sms_from"]) == (114, "cuda:1")


def test_plan_shows_the_pass_that_is_not_built_and_fails(machine, capsys):
    machine(kernels=KERNELS)
    assert doctor.main(["--plan", "causal"]) == 1
    text = capsys.readouterr().out
    assert "fwd_bf16_hd64_causal" in text
    assert "no backward kernel" in text


def test_plan_without_the_compiled_module_says_how_to_get_it(machine, capsys):
    machine()
    assert doctor.main(["--plan", "causal"]) == 1
    assert "not built" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["heads=4", "b=0", "sq=-3", "hd=x", "dtype=fp8", "banded", "b"])
def test_plan_refuses_a_word_that_it_does_not_know(word, capsys):
    with pytest.raises(SystemExit) as caught:
        doctor.main(["--plan", word])
    assert caught.value.code == 2
    assert "--plan" in capsys.readouterr().err


def test_plan_defaults_follow_the_query_side():
    call = doctor.parse_plan(["hq=12", "sq=77", "dtype=half"])
    assert (call["hkv"], call["sk"], call["dtype"], call["mask"]) == (12, 77, "f16", "full")
    assert (call["hd"], call["hdv"]) == (128, 128)
    assert doctor.parse_plan(["hd=192", "hdv=128"])["hdv"] == 128


def test_what_a_build_needs_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    monkeypatch.setattr(doctor.Path, "exists", lambda _: False)
    first, second = doctor.missing_for_a_build()
    assert "CUDA build of torch" in first
    assert "nvcc" in second


def test_it_runs_as_a_module():
    run = subprocess.run(
        [sys.executable, "-m", "flash3.doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    answer = json.loads(run.stdout)
    assert [probe["name"] for probe in answer["probes"]] == PROBES
    assert run.returncode == (0 if answer["ok"] else 1)
