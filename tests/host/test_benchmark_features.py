"""benchmarks.features on CPU: shapes, what is counted, who runs, and that wrong results are not timed."""

import json

import pytest
import torch
from attention_math import seen_keys

pytest.importorskip("benchmarks.features")

from benchmarks import feature_peers, feature_shapes, features
from benchmarks.feature_shapes import SHAPES, Shape

CPU = torch.device("cpu")
HEADS = {"heads": 4, "heads_kv": 2, "head_dim": 16}
SMALL = [
    Shape("window", **HEADS, batch=2, seqlen=64, window=(9, 0)),
    Shape("both sides", **HEADS, seqlen=64, window=(9, 5), causal=False),
    Shape("chunk", **HEADS, seqlen=64, chunk=20),
    Shape("capped", **HEADS, seqlen=64, softcap=2.0),
    Shape("sinks", **HEADS, seqlen=64, sink=True, window=(9, 0)),
    Shape("documents", **HEADS, lengths=(10, 1, 30, 23), window=(9, 0)),
]


def arguments(*extra):
    fast = ["--device", "cpu", "--rounds", "1", "--warmup", "0", "--sample-ms", "0"]
    return features.parse([*fast, *extra])


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_pairs_are_those_of_the_mask(shape):
    mask = shape.causal, shape.window, shape.chunk
    lengths = shape.lengths or (shape.seqlen,) * shape.batch
    assert shape.pairs == sum(int(seen_keys(n, n, *mask).sum()) for n in lengths)
    assert shape.flops("bwd") == 2.5 * shape.flops("fwd") == 2.5 * 4 * 4 * 16 * shape.pairs


def test_documents_have_the_mean_that_was_asked_for():
    lengths = feature_shapes.document_lengths(2**20, 600, 16384)
    assert sum(lengths) == 2**20 and max(lengths) <= 16384 and min(lengths) >= 1
    assert 500 < sum(lengths) / len(lengths) < 700


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_what_a_shape_is_compared_with(shape):
    plain = shape.without()
    assert plain.plain and not plain.packed and plain.pairs > 0
    if shape.packed and shape.plain:
        assert plain.pairs == pytest.approx(shape.pairs, rel=0.15)
    elif not shape.packed:
        assert plain.rows == shape.rows and plain.pairs >= shape.pairs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_a_row(shape, mode):
    row = features.measure(shape, mode, arguments(), CPU)
    results = row["results"]
    assert results["flash3"]["tflops"] > 0 and results["plain"]["tflops"] > 0
    assert results["flash3"]["share_of_bound"] < 1
    if shape.sink:
        assert results["flex"] == {"cannot": "no sinks"}
    elif mode == "fwd":  # on CPU it has no backward
        assert results["flex"]["share_of_bound"] < 1
    if not shape.packed:
        assert results["torch_varlen"] == {"cannot": "packed sequences only"}
    assert "error" in results["fa3"] or "tflops" in results["fa3"] or "cannot" in results["fa3"]
    text = features.table([row], arguments().only)
    assert f"{shape.name}, {mode}" in text and "of ideal" in text
    assert any("official FA3" in line for line in features.notes([row]))


@pytest.mark.parametrize("mode", ["fwd", "bwd"])
def test_a_wrong_result_is_not_timed(mode, monkeypatch):
    def wrong(shape, device, sink):
        right = feature_peers.flash3_forward(shape, device, sink)
        return lambda q, k, v: right(q, k, 1.5 * v)

    monkeypatch.setitem(features.PEERS, "flash3", wrong)
    row = features.measure(SMALL[0], mode, arguments("--only", "flash3"), CPU)
    assert "WrongResult" in row["results"]["flash3"]["error"] and len(row["results"]) == 1


def test_command_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(feature_shapes, "SHAPES", tuple(SMALL))
    command = "--match window|capped --modes fwd --only flash3 --device cpu --rounds 1 --warmup 0"
    assert features.main([*command.split(), "--out", str(tmp_path)]) == 0
    stored = json.loads((tmp_path / "features.json").read_text())
    assert [row["shape"] for row in stored["rows"]] == ["window", "capped"]
    assert "| window, fwd" in (tmp_path / "features.md").read_text()
    assert "capped, fwd" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--only cudnn", "--only: unknown cudnn"),
        ("--modes both", "--modes: unknown both"),
        ("--match nothing", "--match: 'nothing' is found in no shape's name"),
    ],
)
def test_bad_arguments(options, message, capsys):
    with pytest.raises(SystemExit):
        features.parse(options.split())
    assert message in capsys.readouterr().err


def test_report_leaves_out_who_computed_nothing():
    timed = {"ms_median": 2.0, "tflops": 100.0}
    results = {"flash3": timed, "plain": timed, "fa3": {"cannot": "windows"}}
    rows = [{"shape": "window", "mode": "fwd", "results": results}]
    made = features.blocks({"command": "features", "rows": rows})["features"]
    assert "official FA3" not in made and "window, fwd" in made and "1.00" in made
