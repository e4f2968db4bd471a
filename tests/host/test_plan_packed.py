"""Grid and workspace of a call on packed sequences, whose lengths the host does not know. No GPU."""

import math

import pytest

kernels = pytest.importorskip("flash3._C", reason="flash3._C is not built")

ROWS = {row["name"]: row for row in kernels.variants() if row["layout"] == "packed"}
FORWARD = [name for name, row in ROWS.items() if row["pass"] == "fwd"]
BACKWARD = [name for name, row in ROWS.items() if row["pass"] == "bwd"]
LISTED_BLOCK = 32  # bytes, ListedBlock of params.h

# sequences, total_q, total_k, num_heads_q, num_heads_kv
SHAPES = {
    "one token": (1, 1, 1, 1, 1),
    "one sequence": (1, 1000, 3000, 4, 4),
    "8,192 short ones": (8192, 131_072, 131_072, 16, 4),
    "long ones": (3, 300_000, 500_000, 8, 1),
}


def plan(name, shape, deterministic=False):
    row = ROWS[name]
    words = row["pass"], row["dtype"], row["mask"]
    return kernels.plan(*words, *shape, row["head_dim"], 132, deterministic, "packed")


def most_blocks(lengths, tile):
    """Of a slot per length, and of the rows behind them."""
    return sum(math.ceil(length / tile) for length in lengths)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", FORWARD)
def test_forward(name, shape):
    batch, total_q, _, num_heads_q, _ = shape
    blocks = total_q // ROWS[name]["tile"]["m"] + batch + 1
    found = plan(name, shape)
    assert found["row"] == name
    assert found["tiles"] == blocks * num_heads_q
    assert found["grid"] == min(found["tiles"], 132)
    assert found["workspace_bytes"] == 2 * 256 + math.ceil(blocks * LISTED_BLOCK / 256) * 256


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name, shape, deterministic):
    batch, total_q, total_k, num_heads_q, num_heads_kv = shape
    tile = ROWS[name]["tile"]
    q_blocks, k_blocks = total_q // tile["m"] + batch + 1, total_k // tile["n"] + batch + 1
    found = plan(name, shape, deterministic)
    assert found["grid"] == k_blocks * num_heads_kv * found["cluster_size"]
    assert found["seqlen_q_rounded"] == q_blocks * tile["m"]
    rows = found["seqlen_q_rounded"] * num_heads_q
    sizes = [
        *(rows * ROWS[name]["head_dim"] * 4, rows * 4, rows * 4),
        rows // tile["m"] * 4 if deterministic else 0,
        *(4, 4, q_blocks * LISTED_BLOCK, k_blocks * LISTED_BLOCK),
    ]
    assert found["workspace_bytes"] == sum(math.ceil(size / 256) * 256 for size in sizes)


@pytest.mark.parametrize("lengths", [[1] * 9, [128] * 4, [129, 127, 1], [0, 300, 0], [5000]])
@pytest.mark.parametrize("name", FORWARD)
def test_the_list_has_room_for_the_blocks_of_every_split(name, lengths):
    tile = ROWS[name]["tile"]["m"]
    for rest in (0, 1, tile + 1):
        total = sum(lengths) + rest
        room = plan(name, (len(lengths), total, total, 1, 1))["tiles"]
        assert most_blocks([*lengths, rest], tile) <= room
