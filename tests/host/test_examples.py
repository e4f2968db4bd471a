"""The examples on CPU: the text, the model, a short training run with both attentions and on two ranks, the demo."""

import json
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_processes

pytest.importorskip("numpy")
pytest.importorskip("tqdm")
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import context_parallel
import demo
import gpt
import parity
import stdlib_text
import train_gpt

CPU = torch.device("cpu")
EXAMPLES = Path(train_gpt.__file__).parent
SHORT = replace(train_gpt.TINY, context=64, batch=8, steps=30)


@pytest.fixture(scope="module")
def text():
    return stdlib_text.load(CPU)


@pytest.fixture(scope="module")
def runs(text):
    """The same seed with flash3 and with torch's attention."""
    return [
        train_gpt.train(replace(SHORT, attention=name), text, sample_length=20)
        for name in ("flash3", "sdpa")
    ]


def test_text_is_the_standard_library_in_a_fixed_order(text):
    files = stdlib_text.source_files()
    assert files == stdlib_text.source_files()
    names = {path.name for path in files}
    assert {"argparse.py", "typing.py"} <= names
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)
    assert len(text.train) > 10 * len(text.validation) > 1_000_000
    assert b"def " in bytes(text.train[:100_000].tolist())


def test_windows_are_reproducible_and_targets_are_the_next_bytes(text):
    inputs, targets = stdlib_text.windows(text.train, 3, 50, torch.Generator().manual_seed(1))
    again, _ = stdlib_text.windows(text.train, 3, 50, torch.Generator().manual_seed(1))
    assert inputs.shape == targets.shape == (3, 50)
    assert torch.equal(inputs, again)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_windows_reach_the_last_byte():
    data = torch.arange(5, dtype=torch.uint8)
    _, targets = stdlib_text.windows(data, 64, 3, torch.Generator().manual_seed(0))
    assert targets.max() == 4


def test_rotary_scores_depend_on_distance_only():
    table = gpt.rotary_table(64, 32)
    q, k = torch.randn(2, 32)
    rotated_q, rotated_k = (gpt.rotate(x.expand(1, 64, 1, 32), table)[0, :, 0] for x in (q, k))
    scores = rotated_q @ rotated_k.T
    for distance in (0, 7, 40):
        diagonal = scores.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-4)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1)])
def test_the_attentions_agree(heads, kv_heads):
    q = torch.randn(2, 40, heads, 64).bfloat16()
    k, v = torch.randn(2, 2, 40, kv_heads, 64).bfloat16()
    results = {name: attention(q, k, v).float() for name, attention in gpt.ATTENTIONS.items()}
    ours = results.pop("flash3")
    assert ours.shape == (2, 40, heads, 64)
    for name, other in results.items():
        assert (ours - other).abs().max() < (0.3 if name == "flash3-fp8" else 0.05)
        assert (ours - other).norm() < (0.06 if name == "flash3-fp8" else 0.01) * ours.norm()


def test_model_does_not_see_the_future():
    torch.manual_seed(0)
    model = gpt.GPT(SHORT.model, gpt.flash3_attention)
    tokens = torch.randint(256, (1, 32))
    changed = tokens.clone()
    changed[0, 20:] = 0
    with torch.no_grad():
        a, b = model(tokens), model(changed)
    assert torch.equal(a[0, :20], b[0, :20]) and not torch.equal(a[0, 20:], b[0, 20:])


def test_tokens_may_be_in_any_order_if_the_mask_knows_it():
    """A zigzag shard is rotated by positions; with the mask of the same order the logits are those in sequence."""
    torch.manual_seed(0)
    order = torch.randperm(32)
    visible = order[:, None] >= order

    def in_that_order(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
        return out.transpose(1, 2)

    model = gpt.GPT(SHORT.model, gpt.sdpa_attention)
    tokens = torch.randint(256, (1, 32))
    with torch.no_grad():
        logits = model(tokens)
        model.use_attention(in_that_order)
        permuted = model(tokens[:, order], order)
    torch.testing.assert_close(permuted, logits[:, order], rtol=1e-4, atol=1e-5)


def packed_windows():
    """Windows with several documents in a row, one of a single byte, one that ends with its row."""
    tokens = torch.randint(1, 256, (2, 40))
    tokens[0, 11] = tokens[0, 12] = tokens[1, 30] = tokens[1, 39] = 0
    return tokens


def test_documents_end_behind_separators():
    documents = stdlib_text.documents(packed_windows())
    assert documents.ends.tolist() == [0, 12, 13, 40, 71, 80]
    assert documents.ends.dtype == torch.int32
    assert documents.number[0].tolist() == [0] * 12 + [1] + [2] * 27
    assert documents.positions[1].tolist() == [*range(31), *range(9)]


@pytest.mark.parametrize("window", [None, 7])
def test_the_three_attentions_agree_on_documents(window):
    documents = stdlib_text.documents(packed_windows())
    q = torch.randn(2, 40, 4, 64).bfloat16()
    k, v = torch.randn(2, 2, 40, 2, 64).bfloat16()
    for known in (documents, None):
        attentions = [f for f in gpt.ATTENTIONS.values() if f is not gpt.fp8_attention]
        results = [f(q, k, v, known, window).float() for f in attentions]
        assert results[0].shape == (2, 40, 4, 64)
        for other in results[1:]:
            assert (results[0] - other).abs().max() < 0.05


def test_attention_in_float8_refuses_documents_and_windows():
    q = torch.randn(1, 8, 2, 16).bfloat16()
    for given in ({"documents": stdlib_text.documents(packed_windows())}, {"window": 7}):
        with pytest.raises(NotImplementedError, match="no packed documents and no windows"):
            gpt.fp8_attention(q, q, q, **given)


def test_packed_documents_are_those_alone():
    torch.manual_seed(0)
    model = gpt.GPT(SHORT.model, gpt.flash3_attention)
    tokens = packed_windows()
    documents = stdlib_text.documents(tokens)
    with torch.no_grad():
        together = model(tokens, documents=documents)
        alone = model(tokens[:1, 13:])
    torch.testing.assert_close(together[:1, 13:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"pack": True}, {"window": 16}, {"pack": True, "window": 16}])
def test_packed_and_windowed_training_agree_with_sdpa(changes, text):
    settings = replace(FEW_STEPS, **changes)
    text = replace(text, train=text.train.clone())
    text.train[::37] = stdlib_text.SEPARATOR[-1]  # files are longer than this context
    losses = [
        float32_losses(replace(settings, attention=name), text) for name in ("flash3", "sdpa")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0] != pytest.approx(float32_losses(FEW_STEPS, text), abs=1e-4)


def test_learning_rate_warms_up_and_falls_to_a_tenth():
    rates = [train_gpt.learning_rate(step, SHORT) for step in range(SHORT.steps)]
    peak = SHORT.learning_rate
    assert rates[0] == pytest.approx(peak / 3) and max(rates) == pytest.approx(peak)
    assert peak / 10 < rates[-1] < peak / 8


def test_loss_falls_and_the_curves_of_flash3_and_sdpa_agree(runs):
    ours, theirs = runs
    assert ours.losses[0] == pytest.approx(math.log(256), abs=0.2)
    assert ours.losses[-1] < 3.6 and ours.validation_loss < 3.6
    largest, mean = train_gpt.loss_difference(ours, theirs)
    assert largest < 0.05 and mean < 0.01
    assert len(ours.sample) > 10 and ours.tokens_per_second > 0
    assert set(ours.attention_ms) == {"forward", "backward"}


def test_training_in_float8_follows_16_bit_training(runs, text):
    float8 = train_gpt.train(replace(SHORT, attention="flash3-fp8"), text, sample_length=0)
    largest, mean = train_gpt.loss_difference(float8, runs[0])
    assert 0 < largest < 0.1 and mean < 0.02


def test_training_is_reproducible(runs, text):
    again = train_gpt.train(replace(runs[0].settings), text, sample_length=20)
    assert again.losses == runs[0].losses and again.sample == runs[0].sample


def test_report_prints_the_comparison_and_writes_both_files(runs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    train_gpt.report(runs, tmp_path)
    printed = capsys.readouterr().out
    assert "flash3 against sdpa, same seed: loss curves differ by at most" in printed
    assert "tokens/s" in printed and "A sample of flash3's model" in printed
    stored = json.loads((tmp_path / "loss.json").read_text())
    assert [run["settings"]["attention"] for run in stored] == ["flash3", "sdpa"]
    assert stored[0]["losses"] == runs[0].losses
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_command_line_of_train_gpt(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    command = "--device cpu --attention math --context 32 --layers 1 --batch 2 --steps 2 --seed 3"
    command += " --pack --window 9"
    assert train_gpt.main([*command.split(), "--out", str(tmp_path)]) == 0
    settings = json.loads((tmp_path / "loss.json").read_text())[0]["settings"]
    assert (settings["attention"], settings["context"], settings["seed"]) == ("math", 32, 3)
    assert settings["pack"] and settings["window"] == 9
    assert "math, packed, window 9: loss" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train_gpt.main(["--device", "cpu", "--window", "0"])
    assert "--window must be positive, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_gpt.main(["--device", "cpu", "--heads", "3", "--kv-heads", "2"])
    assert "--heads a multiple of --kv-heads" in capsys.readouterr().err


def float32_losses(settings, text, ranks=context_parallel.ALONE):
    """Losses of a few steps in float32, and of the held-out text."""
    train_gpt.autocast, kept = lambda settings: nullcontext(), train_gpt.autocast
    try:
        run = train_gpt.train(settings, text, sample_length=0, ranks=ranks)
    finally:
        train_gpt.autocast = kept
    return [*run.losses, run.validation_loss]


FEW_STEPS = replace(SHORT, batch=4, steps=8)


def divided(how, size):
    return replace(FEW_STEPS, context_parallel=size, context_parallel_attention=how)


def losses_on_a_rank(rank, size):
    text = stdlib_text.load(CPU)
    return {
        how: float32_losses(divided(how, size), text, context_parallel.ContextParallel(how))
        for how in context_parallel.FUNCTIONS
    }


@pytest.mark.slow
def test_ranks_learn_what_one_process_learns(text):
    """In float32, where rounding hides nothing: in bfloat16 partial results are rounded in other places."""
    alone = float32_losses(FEW_STEPS, text)
    assert alone[-2] < alone[0] - 1
    for outcome in run_processes(2, losses_on_a_rank):
        assert not isinstance(outcome, str), outcome
        for how, losses in outcome.items():
            assert losses == pytest.approx(alone, abs=1e-5), how


@pytest.mark.slow
def test_torchrun_divides_the_context_and_compares_with_one_process(tmp_path):
    pytest.importorskip("matplotlib")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = "--device cpu --context-parallel 2 --compare flash3 --context 64 --batch 4 --steps 6"
    command = [sys.executable, *torchrun, str(EXAMPLES / "train_gpt.py"), *options.split()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("MB of text") == ran.stdout.count("Loss curve") == 1
    assert "flash3 on 2 ranks (ring) against flash3, same seed" in ran.stdout
    assert ran.stderr.count("training, flash3 on 2 ranks (ring):   0%") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"loss.json", "loss.png"}
    divided, alone = json.loads((tmp_path / "out" / "loss.json").read_text())
    assert divided["settings"]["context_parallel"] == 2 and divided["sample"]
    assert alone["settings"]["context_parallel"] == 1
    # bfloat16 has 8 bits; the loss is a mean over 256 bytes.
    assert divided["losses"] == pytest.approx(alone["losses"], abs=5e-3)


@pytest.mark.parametrize(
    "options, words",
    [
        ("--context-parallel 3", "must be the number of processes, 2, got 3"),
        ("--context-parallel 0", "must be the number of processes, 2, got 0"),
        ("", "must be the number of processes, 2, got 1"),
        ("--context-parallel 2 --context 66", "--context must be a multiple of 4"),
        ("--context-parallel 2 --attention sdpa", "for --attention flash3, got sdpa"),
        ("--context-parallel 2 --pack", "does without --pack and --window"),
        ("--context-parallel 2 --window 8", "does without --pack and --window"),
        ("--context-parallel 2 --device cuda:1", "a GPU for each rank, or cpu, got cuda:1"),
    ],
)
def test_context_parallel_settings_that_do_not_fit(options, words, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        train_gpt.main(["--device", "cpu", *options.split()])
    assert words in capsys.readouterr().err


def test_context_parallel_needs_processes(monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for options, words in [
        ("--context-parallel 2", "must be the number of processes, 1, got 2; torchrun"),
        ("--context-parallel-attention ring", "--context-parallel-attention needs"),
    ]:
        with pytest.raises(SystemExit):
            train_gpt.main(["--device", "cpu", *options.split()])
        assert words in capsys.readouterr().err


def test_demo_on_cpu(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(demo, "choose_device", lambda: (CPU, "The CPU reference path runs."))
    monkeypatch.setattr(parity, "CASES", parity.CASES[2:4])
    monkeypatch.setattr(train_gpt, "TINY", replace(SHORT, steps=60))
    assert demo.main(["--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("  ok\n") == 2
    assert printed.rstrip().endswith(f"Loss curve: {tmp_path / 'loss.png'}")


@pytest.mark.parametrize("fault", ["zero", "nan"])
def test_demo_fails_where_flash3_is_wrong(fault, monkeypatch, capsys):
    right = parity.by_flash3

    def wrong(*arguments):
        results = right(*arguments)
        if fault == "zero":
            results["dk"].zero_()
        else:
            results["lse"][0, 0, 5] = math.nan
        return results

    monkeypatch.setattr(demo, "choose_device", lambda: (CPU, ""))
    monkeypatch.setattr(parity, "CASES", parity.CASES[3:4])
    monkeypatch.setattr(parity, "by_flash3", wrong)
    assert demo.main([]) == 1
    assert "  WRONG" in capsys.readouterr().out


def test_demo_says_which_path_runs_and_why():
    device, which = demo.choose_device()
    assert ("Hopper kernels run" in which) if device.type == "cuda" else ("because" in which)
