"""Which kernel row serves a call, from csrc/launch/dispatch.cpp through flash3._C. No GPU."""

import itertools
import re

import pytest
import torch
from variants import generate, table

kernels = pytest.importorskip("flash3._C", reason="flash3._C is not built")

ROWS = {row["name"]: row for row in kernels.variants()}
WORDS = ("fwd", "bwd"), ("f16", "bf16"), ("full", "causal", "local"), ("dense", "packed")
KEYS = list(itertools.product(*WORDS))  # pass, dtype, mask, layout
LARGEST = 8192  # no row holds such a head_dim


def plan(key, head_dim, **changes):
    sizes = {"batch": 2, "seqlen_q": 100, "seqlen_k": 200, "num_heads_q": 4, "num_heads_kv": 2}
    *words, layout = key
    return kernels.plan(*words, **{**sizes, "head_dim": head_dim, "layout": layout, **changes})


def key_of(row):
    return row["pass"], row["dtype"], row["mask"], row["layout"]


def head_dims_of(row):
    return row["head_dim"], row["head_dim_v"]


def fitting(key, head_dim, head_dim_v):
    """The built rows of a key that hold a call, smallest first."""
    rows = [r for r in ROWS.values() if key_of(r) == key]
    rows = [r for r in rows if r["head_dim"] >= head_dim and r["head_dim_v"] >= head_dim_v]
    return sorted(rows, key=head_dims_of)


def test_the_build_holds_rows_of_the_table_as_the_table_has_them():
    """The loaded binary and the table that is checked out agree; if not, build again."""
    expected = {row.name: row for row in table.all_rows()}
    for name, row in ROWS.items():
        source = expected[name]
        key = source.key
        assert key_of(row)[1:] == (key.dtype, key.mask, key.layout)
        assert head_dims_of(row) == (key.head_dim, key.head_dim_v)
        assert row["tile"] == {field: getattr(source, field) for field in row["tile"]}
        assert row["why"] == source.why


# plan() knows no float8: which of its rows serves a call, tests/gpu/test_fp8.py sees.
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row["pass"] != "fp8"])
def test_a_row_serves_its_own_key(name):
    row = ROWS[name]
    sizes = {"head_dim_v": row["head_dim_v"], "seqlen_q": row["tile"]["m"]}
    assert plan(key_of(row), row["head_dim"], **sizes)["row"] == name


@pytest.mark.parametrize(
    ("seqlen_q", "m"),
    [
        (1, 128),
        (128, 128),
        (129, 192),
        (192, 192),
        (197, 128),
        (256, 128),
        (257, 192),
        (16384, 192),
    ],
)
def test_of_two_tiles_the_one_that_suits_the_queries(seqlen_q, m):
    rows = [r for r in ROWS.values() if r["name"].startswith("fwd_bf16_hd64_full")]
    if {r["tile"]["m"] for r in rows if r["layout"] == "dense"} != {128, 192}:
        pytest.skip("not built: both rows")
    found = plan(("fwd", "bf16", "full", "dense"), 64, seqlen_q=seqlen_q)["row"]
    assert ROWS[found]["tile"]["m"] == m


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_every_head_dim_is_served_by_the_smallest_row_that_holds_both(key):
    for head_dim, head_dim_v in itertools.product(range(8, 257, 8), repeat=2):
        found = fitting(key, head_dim, head_dim_v)
        if found:
            row = ROWS[plan(key, head_dim, head_dim_v=head_dim_v)["row"]]
            assert key_of(row) == key and head_dims_of(row) == head_dims_of(found[0])
        else:
            v = "" if head_dim_v == head_dim else f" and {head_dim_v} of v"
            with pytest.raises(RuntimeError, match=f"head_dim {head_dim}{v}, mask {key[2]}"):
                plan(key, head_dim, head_dim_v=head_dim_v)


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_a_missing_row_is_an_error_that_helps(key):
    """It names what was wanted, built rows of the same pass with the likest first, and how to build the rest."""
    with pytest.raises(RuntimeError) as caught:
        plan(key, LARGEST)
    message = str(caught.value)
    name, dtype, mask, layout = key
    assert {"fwd": "forward", "bwd": "backward"}[name] in message
    assert f"dtype {dtype}, head_dim {LARGEST}, mask {mask}, layout {layout}" in message

    of_this_pass = {row for row in ROWS if row.startswith(name)}
    nearest = re.search(r"Nearest built rows: ([^.]*)\.", message).group(1).split(", ")
    if of_this_pass:
        assert set(nearest) <= of_this_pass
        assert len(nearest) == min(3, len(of_this_pass))
        if fitting(key, 8, 8):
            assert nearest[0] == fitting(key, 8, 8)[-1]["name"]

    words = re.search(r'FLASH3_VARIANTS="([^"]*)"', message).group(1)
    selected = [row.name for row in generate.select(words)]
    layouts = ("packed",) if layout == "packed" else ("dense", "packed")
    assert selected == [
        r.name
        for r in table.all_rows()
        if (r.key.dtype, r.key.mask) == (dtype, mask) and r.key.layout in layouts
    ]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (("forward", "bf16", "full", "dense"), "pass must be fwd or bwd, got 'forward'"),
        (("fwd", "bfloat16", "full", "dense"), "dtype must be f16 or bf16, got 'bfloat16'"),
        (("fwd", "bf16", "sparse", "dense"), "mask must be full or causal or local, got 'sparse'"),
        (("fwd", "bf16", "full", "paged"), "layout must be dense or packed, got 'paged'"),
    ],
    ids=["pass", "dtype", "mask", "layout"],
)
def test_an_unknown_word_is_a_value_error(key, message):
    with pytest.raises(ValueError, match=message):
        plan(key, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "at least 1"),
        ({"seqlen_k": -1}, "at least 1"),
        ({"num_sms": 0}, "at least 1"),
        ({"num_heads_kv": 3}, "num_heads_kv must divide num_heads_q, 4, got 3"),
        ({"head_dim": 60}, "head_dim must be a multiple of 8, got 60"),
        ({"head_dim_v": 60}, "head_dim_v must be a positive multiple of 8, got 60"),
        ({"head_dim_v": 0}, "head_dim_v must be a positive multiple of 8, got 0"),
    ],
    ids=str,
)
def test_sizes_that_no_call_has_are_value_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(("fwd", "bf16", "full", "dense"), **{"head_dim": 64, **changes})


@pytest.mark.parametrize("op", ["fwd", "bwd", "varlen_fwd", "varlen_bwd", "sink_bwd"])
def test_loading_the_module_registers_the_cuda_implementation(op):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"flash3::{op}", "CUDA")


def test_build_info_names_the_versions():
    info = kernels.build_info()
    assert info["arch"] == "sm_90a"
    assert re.fullmatch(r"\d+\.\d+", info["cuda_version"])
    assert re.fullmatch(r"2\.\d+", info["torch_target"])
    assert info["cutlass_version"] != "unknown"
