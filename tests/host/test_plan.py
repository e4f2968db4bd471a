"""Grid and workspace of a call, from csrc/launch/plan.cpp through flash3._C. No GPU."""

import math

import pytest

kernels = pytest.importorskip("flash3._C", reason="flash3._C is not built")

ROWS = {row["name"]: row for row in kernels.variants()}
DENSE = [name for name, row in ROWS.items() if row["layout"] == "dense"]
FORWARD = [name for name in DENSE if ROWS[name]["pass"] == "fwd"]
BACKWARD = [name for name in DENSE if ROWS[name]["pass"] == "bwd"]

# batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv
SHAPES = {
    "one token": (1, 1, 1, 1, 1),
    "one tile": (1, 64, 64, 1, 1),
    "one row more than tiles": (2, 385, 641, 4, 4),
    "gqa": (2, 1000, 8192, 32, 8),
    "mqa": (3, 4096, 77, 16, 1),
    "batch 70,000": (70_000, 5, 9, 2, 1),
}


def plan(name, shape, *, num_sms=132, deterministic=False, narrower=0):
    """Of a call with the row's head_dims, each less ``narrower``."""
    row = ROWS[name]
    head_dim, head_dim_v = row["head_dim"] - narrower, row["head_dim_v"] - narrower
    words = row["pass"], row["dtype"], row["mask"]
    return kernels.plan(*words, *shape, head_dim, num_sms, deterministic, head_dim_v=head_dim_v)


def rows_of_its_key(name):
    """The row, and those whose tiles alone differ: which of them runs goes by the lengths."""
    key = ("pass", "dtype", "mask", "layout", "head_dim", "head_dim_v")
    return {other for other in DENSE if all(ROWS[other][k] == ROWS[name][k] for k in key)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", FORWARD)
def test_forward_grid_is_one_cta_per_tile_until_the_gpu_is_full(name, shape):
    batch, seqlen_q, _, num_heads_q, _ = shape
    for num_sms in (1, 132):
        found = plan(name, shape, num_sms=num_sms)
        assert found["row"] in rows_of_its_key(name)
        tile = ROWS[found["row"]]["tile"]
        tiles = math.ceil(seqlen_q / tile["m"]) * num_heads_q * batch
        assert found["tile"] == tile
        assert found["tiles"] == tiles
        assert found["grid"] == min(tiles, num_sms)


@pytest.mark.parametrize("name", FORWARD + BACKWARD)
def test_every_row_runs_for_some_shape(name):
    assert name in {plan(name, shape)["row"] for shape in SHAPES.values()}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_workspace_is_the_tile_counter_of_a_dynamic_schedule(name):
    expected = 4 if ROWS[name]["tile"]["dynamic_schedule"] else 0
    assert plan(name, SHAPES["gqa"])["workspace_bytes"] == expected


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_grid_is_one_cluster_per_key_block_of_a_kv_head(name, shape):
    batch, _, seqlen_k, num_heads_q, num_heads_kv = shape
    n_blocks = math.ceil(seqlen_k / ROWS[name]["tile"]["n"])
    found = plan(name, shape)
    assert found["grid"] == n_blocks * num_heads_kv * batch * found["cluster_size"]
    assert num_heads_q // num_heads_kv % found["cluster_size"] == 0
    assert found["cluster_size"] in (1, 2, 4, 8)


# batch, seqlen in rows that own 128 keys a CTA, num_heads_q, num_heads_kv -> cluster size with a full and with a causal
# mask, on 132 SMs
CLUSTERS = {
    "every query head has its own keys": ((1, 512, 8, 8), (1, 1)),
    "a group of 4, one wave of CTAs": ((1, 8192, 8, 2), (1, 2)),
    "a group of 4, four waves": ((4, 8192, 8, 2), (1, 2)),
    "a group of 4, many CTAs": ((8, 8192, 32, 8), (1, 1)),
    "a group of 8, half a wave": ((2, 4096, 8, 1), (2, 4)),
    "a group of 8, a few CTAs": ((1, 1024, 8, 1), (8, 8)),
    "a group of 5": ((1, 1024, 40, 8), (1, 1)),
    "a group of 6": ((1, 1024, 6, 1), (2, 2)),
}


@pytest.mark.parametrize(("shape", "sizes"), CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("name", BACKWARD)
def test_query_heads_of_a_group_are_divided_where_sms_would_idle(name, shape, sizes):
    batch, seqlen, num_heads_q, num_heads_kv = shape
    seqlen = seqlen * ROWS[name]["tile"]["n"] // 128  # as many blocks of keys in every row
    found = plan(name, (batch, seqlen, seqlen, num_heads_q, num_heads_kv))
    size = sizes[ROWS[name]["mask"] == "causal"]
    assert found["cluster_size"] == size
    assert ("cluster" in found["why"]) == (size > 1)


@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "deterministic"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_workspace_holds_its_parts_one_after_the_other(name, shape, deterministic):
    batch, seqlen_q, _, num_heads_q, _ = shape
    tile_m = ROWS[name]["tile"]["m"]
    found = plan(name, shape, deterministic=deterministic)

    rounded = found["seqlen_q_rounded"]
    assert rounded % tile_m == 0
    assert rounded % 64 == 0  # rows of fp32 start on 256 bytes
    assert seqlen_q <= rounded < seqlen_q + math.lcm(tile_m, 64)

    rows = batch * num_heads_q * rounded
    sizes = {
        "dq_accum": rows * ROWS[name]["head_dim"] * 4,
        "lse_log2": rows * 4,
        "dpsum": rows * 4,
        "dq_turn": rows // tile_m * 4 if deterministic else 0,
    }
    end = 0
    for part, size in sizes.items():
        assert found["workspace_offsets"][part] == end, part
        end += math.ceil(size / 256) * 256
    assert found["workspace_bytes"] == end


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_workspace_is_sized_for_the_rows_head_dim(name):
    """dQ is summed in the layout of the kernel's accumulator, which is as wide as the row, not as the call."""
    shape = SHAPES["gqa"]
    below = plan(name, shape, narrower=8)
    if below["row"] != name:
        pytest.skip("another row serves the smaller head_dim")
    assert below["workspace_bytes"] == plan(name, shape)["workspace_bytes"]


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_workspace_beyond_32_bits(name):
    """70,000 x 32 heads x 4,096 rows: more than 2^33 rows, counted without overflow."""
    rows = 70_000 * 32 * 4096
    bytes_per_row = ROWS[name]["head_dim"] * 4 + 8
    assert plan(name, (70_000, 4096, 128, 32, 1))["workspace_bytes"] == rows * bytes_per_row


@pytest.mark.parametrize("name", FORWARD + BACKWARD)
def test_a_grid_beyond_32_bits_is_an_error(name):
    with pytest.raises(RuntimeError, match=r"more than 2\^31 - 1"):
        plan(name, (2**30, 1, 1, 8, 8))


@pytest.mark.parametrize("name", FORWARD + BACKWARD)
def test_why_gives_the_tile_the_experiment_and_the_padding(name):
    found = plan(name, SHAPES["gqa"])
    row, why = ROWS[found["row"]], found["why"]
    assert found["row"] in rows_of_its_key(name)
    assert f"tile {row['tile']['m']}x{row['tile']['n']} ({row['why']})" in why
    assert "padded" not in why
    padded = plan(name, SHAPES["gqa"], narrower=8)
    v = "" if row["head_dim_v"] == row["head_dim"] else f" and {row['head_dim_v']}"
    assert padded["row"] != row["name"] or f"padded to {row['head_dim']}{v} by TMA" in padded["why"]


@pytest.mark.parametrize("name", FORWARD)
def test_why_says_when_sms_stay_idle(name):
    assert "131 SMs idle" in plan(name, SHAPES["one token"])["why"]
    assert "persistent" in plan(name, SHAPES["gqa"])["why"]
