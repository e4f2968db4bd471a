"""The variant table, the model of what a row may cost, and the sources that are made from it."""

import itertools
from dataclasses import replace

import pytest
from variants import document, generate, limits
from variants.table import BACKWARD, CORE, DTYPES, FORWARD, LAYOUTS, MASKS, all_rows

# head_dim of q, of v; those of packed rows, and those that only dense rows have
HEAD_DIMS = {
    "fwd": {(64, 64), (128, 128), (192, 192), (256, 256)},
    "bwd": {(64, 64), (128, 128), (256, 256)},
}
DENSE_ALONE = {"fwd": {(96, 96), (192, 128)}, "bwd": {(96, 96), (192, 192), (192, 128)}}
WITHOUT_A_ROW = {("fwd", (192, 192), "local")}  # served by head_dim 256
ROWS = {row.name: row for row in all_rows()}


def with_packed(*names):
    """The dense rows, then the packed ones, as the table lists them."""
    return [*names, *(f"{name}_packed" for name in names)]


# Two rows with tiles of their own, so that tuning the table changes no expectation here.
FWD = replace(ROWS["fwd_bf16_hd128_full"], m=128, n=176, kv_stages=2, q_stages=1, mma_warpgroups=2)
BWD = replace(
    ROWS["bwd_bf16_hd128_causal"],
    m=64,
    n=128,
    q_stages=2,
    do_stages=2,
    mma_warpgroups=2,
)


def head_dims_of(row):
    return row.key.head_dim, row.key.head_dim_v


@pytest.mark.parametrize("row", all_rows(), ids=lambda row: row.name)
def test_row_can_be_built(row):
    assert limits.problems(row) == []


def test_names_are_unique_and_the_table_is_within_its_budget():
    limits.check(all_rows())
    assert len(ROWS) == len(all_rows()) <= limits.KERNEL_BUDGET


@pytest.mark.parametrize(("kind", "rows"), [("fwd", FORWARD), ("bwd", BACKWARD)])
def test_every_combination_is_served(kind, rows):
    keys = {(row.key.dtype, head_dims_of(row), row.key.mask, row.key.layout) for row in rows}
    expected = {
        key
        for key in (
            *itertools.product(DTYPES, HEAD_DIMS[kind], MASKS, LAYOUTS),
            *itertools.product(DTYPES, DENSE_ALONE[kind], ("full", "causal"), ["dense"]),
        )
        if (kind, *key[1:3]) not in WITHOUT_A_ROW
    }
    assert keys == expected
    tagged = [row for row in rows if row.tag]  # second tiles
    assert len(rows) - len(tagged) == len(keys)
    assert [row.name for row in tagged if row.name != f"fwd_{row.key.dtype}_hd64_full_m128"] == []


@pytest.mark.parametrize("row", all_rows(), ids=lambda row: row.name)
def test_a_packed_row_has_the_tile_of_the_dense_one(row):
    if row.key.layout == "dense":
        assert not row.name.endswith("_packed")
        return
    dense = ROWS[row.name.removesuffix("_packed")]
    if row.name.startswith("fwd"):
        assert row.dynamic_schedule, "lengths differ"
        dense = replace(dense, dynamic_schedule=True)
    assert row == replace(dense, key=replace(dense.key, layout="packed"), why=row.why)


def test_core_rows_exist_and_cover_every_path():
    rows = [ROWS[name] for name in CORE]
    for kind in ("fwd", "bwd"):
        chosen = [row for row in rows if row.name.startswith(kind)]
        assert {head_dims_of(row) for row in chosen} == HEAD_DIMS[kind] | DENSE_ALONE[kind]
        assert {row.key.mask for row in chosen} == set(MASKS)
        assert {row.key.layout for row in chosen} == set(LAYOUTS)


@pytest.mark.parametrize("row", all_rows(), ids=lambda row: row.name)
def test_row_names_the_experiment_that_chose_it(row):
    assert row.why


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (replace(FWD, m=192), "m 192 is not 64"),
        (replace(FWD, n=100), "n 100 is not a multiple of 16"),
        (replace(FWD, n=272), "up to 256"),
        (replace(FWD, kv_stages=4), "bytes of shared memory"),
        (replace(FWD, n=256, kv_stages=1), "registers a thread"),
        (replace(FWD, kv_stages=0), "not all at least 1"),
        (replace(FWD, guesses=True, key=replace(FWD.key, mask="local")), "guesses, which local"),
        (replace(FWD, m=256, mma_warpgroups=4), "mma_warpgroups 4"),
        (replace(FWD, key=replace(FWD.key, head_dim=80)), "head_dim 80 is not a multiple of 32"),
        (replace(FWD, key=replace(FWD.key, v=72)), "head_dim 72 is not a multiple of 32"),
        (replace(FWD, n=80, key=replace(FWD.key, v=192)), "of v is above that of q, 128"),
        (replace(FWD, key=replace(FWD.key, dtype="f64")), "dtype f64"),
        (replace(FWD, key=replace(FWD.key, mask="sparse")), "mask sparse"),
        (replace(FWD, key=replace(FWD.key, layout="paged")), "layout paged"),
        (replace(BWD, n=96), "n 96 is not 64, or 64 * mma_warpgroups"),
        (replace(BWD, m=96), "m 96 is not 64 or 128"),
        (replace(BWD, mma_warpgroups=3, n=192), "mma_warpgroups 3 is not 2"),
        (replace(BWD, q_stages=3), "not powers of two"),
        (replace(BWD, m=128), "registers a thread"),
        (replace(BWD, q_stages=8), "bytes of shared memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_row_is_refused_with_the_reason(row, message):
    with pytest.raises(limits.LimitError, match=row.name) as refused:
        limits.check([row])
    assert message in str(refused.value)


def test_double_row_is_refused():
    with pytest.raises(limits.LimitError, match="2 rows have this key"):
        limits.check([FWD, FWD])


def test_table_beyond_the_budget_is_refused(monkeypatch):
    monkeypatch.setattr(limits, "KERNEL_BUDGET", 3)
    with pytest.raises(limits.LimitError, match="its budget is 3"):
        limits.check(all_rows())


def test_shared_memory_model_counts_every_tile():
    row = replace(FWD, m=128, n=128, q_stages=1, kv_stages=2)
    assert limits.smem_bytes(row) == (128 + 4 * 128) * 128 * 2 + limits.BARRIER_BYTES
    row = replace(BWD, m=64, n=128, q_stages=2, do_stages=2)
    tiles = 2 * 128 * 128 * 2 + 4 * 64 * 128 * 2 + 2 * 64 * 128 * 2 + 4 * 64 * 4
    assert limits.smem_bytes(row) == tiles + limits.BARRIER_BYTES


def test_the_model_counts_the_head_dim_of_v_where_it_matters():
    key = replace(FWD.key, head_dim=192, v=128)
    row = replace(FWD, key=key, m=128, n=112, q_stages=1, kv_stages=2)
    tiles = 128 * 192 + 2 * 112 * (192 + 128)
    assert limits.smem_bytes(row) == tiles * 2 + limits.BARRIER_BYTES
    assert limits.registers(row) == 56 + 28 + 64 + limits.OTHER_REGISTERS
    assert limits.gemm_widths(row) == {112, 128}
    row = replace(BWD, key=key, m=64, n=64, q_stages=4, do_stages=2)
    tiles = 64 * (192 + 128) + 64 * (4 * 192 + 2 * 128) + 4 * 64 * 64
    assert limits.smem_bytes(row) == tiles * 2 + 6 * 64 * 4 + limits.BARRIER_BYTES
    assert limits.registers(row) == 48 + 32 + 16 + 48 + limits.OTHER_REGISTERS
    assert limits.gemm_widths(row) == {32, 96, 64}


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("all", list(ROWS)),
        ("core", [name for name in ROWS if name in CORE]),
        ("hd128,bf16,fwd", with_packed(*(f"fwd_bf16_hd128_{mask}" for mask in MASKS))),
        (" bwd , hd64, f16 ", with_packed(*(f"bwd_f16_hd64_{mask}" for mask in MASKS))),
        ("packed,hd192,f16", ["fwd_f16_hd192_full_packed", "fwd_f16_hd192_causal_packed"]),
        ("core,bwd", [name for name in ROWS if name in CORE and name.startswith("bwd")]),
        ("fwd_f16_hd64_full", ["fwd_f16_hd64_full"]),
    ],
)
def test_filter_selects_rows_by_words(spec, names):
    assert [row.name for row in generate.select(spec)] == names


@pytest.mark.parametrize("spec", ["hd512", "f1", "fwd,bwd", ",", "BF16"])
def test_filter_without_a_match_lists_the_words(spec):
    words = "bf16, bwd, causal, e4m3, f16, full, fwd, hd128, hd192, hd256, hd64, hd96, "
    words += "local, m128, n128, packed, twolevel, v128"
    with pytest.raises(generate.FilterError, match=words):
        generate.select(spec)


def test_row_source_states_the_row():
    text = generate.row_source(FWD)
    assert '#include "forward/launch.cuh"' in text
    assert "struct fwd_bf16_hd128_full {\n  using Element = cutlass::bfloat16_t;" in text
    assert "KernelKey key = {DType::kBF16, 128, 128, MaskKind::kFull};" in text
    assert f"FwdTile tile = {{.m = {FWD.m}, .n = {FWD.n}, .kv_stages = {FWD.kv_stages}," in text
    assert "void launch_fwd_bf16_hd128_full(FwdParams const& params, cudaStream_t stream)" in text
    packed = generate.row_source(ROWS["fwd_f16_hd64_causal_packed"])
    assert "key = {DType::kF16, 64, 64, MaskKind::kCausal, SeqLayout::kPacked};" in packed
    pair = generate.row_source(ROWS["bwd_bf16_hd192_v128_full"])
    assert "key = {DType::kBF16, 192, 128, MaskKind::kFull};" in pair
    assert "launch_bwd<bwd_bf16_hd128_causal>(params, stream);" in generate.row_source(BWD)


def test_table_source_lists_rows_in_order_and_survives_an_empty_side():
    text = generate.tables_source([FWD])
    assert text.count(f'"{FWD.name}", "{FWD.why}", launch_{FWD.name}}}') == 1
    assert "std::span<BwdEntry const> bwd_table() { return {}; }" in text
    both = generate.tables_source(all_rows())
    places = [both.index(f'"{name}"') for name in ROWS]
    assert places == sorted(places)


def test_generation_is_deterministic_and_touches_only_what_changed(tmp_path):
    rows = generate.select("core")
    sources = generate.generate(rows, tmp_path)
    assert [path.stem for path in sources] == [row.name for row in rows]
    before = {path: (path.read_text(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    sources[0].write_text("something else")
    generate.generate(rows, tmp_path)
    after = {path: (path.read_text(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    assert {p: text for p, (text, _) in after.items()} == {
        p: text for p, (text, _) in before.items()
    }
    assert [path for path in before if after[path] != before[path]] == [sources[0]]


def test_the_document_lists_the_table_as_it_is():
    """Written by `python csrc/variants/document.py --write`."""
    assert document.DOCUMENT.read_text() == document.document()
