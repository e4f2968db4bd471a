"""The CPU implementation, which is the specification, against the plain formula and against torch's own attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from attention_math import attention_math, run, run_flash3, run_float64, run_same_dtype
from cases import EMPTY, HALF_DTYPES, HEADS, SHORT, TINY, Case, by_head_dim, by_heads, by_length
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_as_accurate

from flash3 import reference

EXACT = {"rtol": 1e-9, "atol": 1e-10}  # two float64 computations in different order
NAMES = ("out", "lse", "dq", "dk", "dv")


def run_blockwise(inputs, tile_m, tile_n, causal):
    """The reference functions called directly, with tiles small enough that every block boundary is crossed."""
    q, k, v = inputs.q, inputs.k, inputs.v
    scale, tiles = q.shape[-1] ** -0.5, {"tile_m": tile_m, "tile_n": tile_n}
    out, lse = reference.attention_forward(q, k, v, scale, causal, **tiles)
    grads = reference.attention_backward(
        inputs.dout, q, k, v, out, lse, inputs.dlse, scale, causal, **tiles
    )
    return out, lse, *grads


def assert_equals_float64(results, right):
    for name, x in zip(NAMES, results, strict=True):
        torch.testing.assert_close(
            x, getattr(right, name), **EXACT, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("tiles", [(1, 1), (16, 32), (48, 16), (128, 128)], ids=str)
@pytest.mark.parametrize(
    "case", by_length([*TINY, *SHORT[:3], (33, 70), (70, 33)], head_dim=8), ids=str
)
def test_every_tiling_gives_the_formula(case, tiles):
    if tiles == (1, 1) and case.seqlen_q * case.seqlen_k > 100:
        tiles = (3, 5)
    inputs = case.inputs(torch.float64, dlse=True)
    results = run_blockwise(inputs, *tiles, case.causal)
    assert_equals_float64(results, run_float64(inputs, causal=case.causal))


@pytest.mark.parametrize("case", by_heads(HEADS, seqlen_q=11, seqlen_k=18, head_dim=8), ids=str)
def test_grouped_heads(case):
    inputs = case.inputs(torch.float64, dlse=True)
    assert_equals_float64(
        run_blockwise(inputs, 8, 16, case.causal), run_float64(inputs, causal=case.causal)
    )


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32])
@pytest.mark.parametrize(
    "case",
    by_length([(63, 97), (128, 128), (193, 130)])
    + by_head_dim([8, 72, 128, 192, 256], seqlen_q=40, seqlen_k=65)
    + by_head_dim([24, 192], seqlen_q=40, seqlen_k=65, head_dim_v=128)
    + by_head_dim([64], seqlen_q=40, seqlen_k=65, head_dim_v=16),
    ids=str,
)
def test_low_precision_is_as_accurate_as_torch(case, dtype):
    inputs = case.inputs(dtype, dlse=True)
    assert_as_accurate(
        run_flash3(inputs, causal=case.causal),
        run_float64(inputs, causal=case.causal),
        run_same_dtype(inputs, causal=case.causal),
        inputs,
    )


@pytest.mark.parametrize("case", by_length([(40, 40), (17, 63)], num_heads_q=4), ids=str)
def test_agrees_with_sdpa(case):
    inputs = case.inputs(torch.float64)
    seen = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool)
    if case.causal:
        seen = seen.tril(case.seqlen_k - case.seqlen_q)  # torch's is_causal is top-left aligned

    def sdpa(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(
            1, 2
        )

    ours, theirs = run_flash3(inputs, causal=case.causal), run(sdpa, inputs)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), **EXACT)


@pytest.mark.parametrize("lengths", [(3, 3), (2, 5), (5, 2), (1, 4), (4, 1)], ids=str)
def test_causal_mask_by_brute_force(lengths):
    """Row by row and key by key, with loops: key j is seen by query i if j <= i + sk - sq."""
    seqlen_q, seqlen_k = lengths
    q, k, v = (torch.randn(1, s, 1, 8, dtype=torch.float64) for s in (seqlen_q, seqlen_k, seqlen_k))
    out, lse = reference.attention_forward(q, k, v, 0.5, True, tile_m=2, tile_n=2)
    for i in range(seqlen_q):
        keys = [j for j in range(seqlen_k) if j <= i + seqlen_k - seqlen_q]
        weights = [math.exp(0.5 * float(q[0, i, 0] @ k[0, j, 0])) for j in keys]
        total = sum(weights)
        expected = sum(
            (w / total * v[0, j, 0] for w, j in zip(weights, keys, strict=True)), torch.zeros(8)
        )
        torch.testing.assert_close(out[0, i, 0], expected.double())
        assert lse[0, 0, i].item() == pytest.approx(math.log(total) if keys else -math.inf)


@pytest.mark.parametrize("case", by_length([(9, 4), (200, 130)], head_dim=16), ids=str)
def test_rows_without_a_key(case):
    inputs = case.inputs(torch.float32, dlse=True)
    blind = max(0, case.seqlen_q - case.seqlen_k) if case.causal else 0
    inputs.dlse[..., :blind] = math.nan  # what log and exp of -inf tend to send back
    result = run_flash3(inputs, causal=case.causal)
    assert (result.out[:, :blind] == 0).all()
    assert (result.lse[..., :blind] == -math.inf).all()
    assert (result.dq[:, :blind] == 0).all()
    assert all(x.isfinite().all() for x in (result.dq, result.dk, result.dv))
    assert result.lse[..., blind:].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("lengths", [*EMPTY, (3, 4)], ids=str)
def test_empty_extents(lengths, batch, causal):
    if batch and lengths == (3, 4):
        pytest.skip("nothing is empty")
    case = Case(*lengths, head_dim=8, batch=batch, num_heads_q=4, causal=causal)
    inputs = case.inputs(torch.bfloat16, dlse=True)
    result = run_flash3(inputs, causal=causal)
    assert (result.out == 0).all() and (result.lse == -math.inf).all()
    for grad, x in ((result.dq, inputs.q), (result.dk, inputs.k), (result.dv, inputs.v)):
        assert grad.shape == x.shape and (grad == 0).all()


@pytest.mark.parametrize(
    "case", by_length([(3, 4), (4, 2)], head_dim=8, batch=1, num_heads_kv=1), ids=str
)
def test_gradcheck(case):
    inputs = case.inputs(torch.float64)
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]

    def attention(q, k, v):
        out, lse = torch.ops.flash3.fwd(q, k, v, 0.4, case.causal)
        return out, lse.masked_fill(lse.isneginf(), 0.0)

    assert torch.autograd.gradcheck(attention, tensors)


def test_lse_alone_differentiates():
    """Only lse reaches the loss: dv is zero, dq and dk are those of a log-sum-exp."""
    inputs = Case(6, 9, head_dim=8, causal=True).inputs(torch.float64)
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    ours = torch.autograd.grad(
        torch.ops.flash3.fwd(*tensors, 0.3, True)[1].sum(), tensors, materialize_grads=True
    )
    right = torch.autograd.grad(
        attention_math(*tensors, 0.3, True)[1].sum(), tensors, materialize_grads=True
    )
    for x, expected in zip(ours, right, strict=True):
        torch.testing.assert_close(x, expected, **EXACT)


@settings(max_examples=25)
@given(
    seqlen_q=st.integers(0, 50),
    seqlen_k=st.integers(0, 50),
    head_dim=st.integers(1, 4).map(lambda n: 8 * n),
    group=st.integers(1, 4),
    num_heads_kv=st.integers(1, 3),
    batch=st.integers(0, 3),
    causal=st.booleans(),
    tiles=st.tuples(st.integers(4, 40), st.integers(4, 40)),
)
def test_drawn_shapes(seqlen_q, seqlen_k, head_dim, group, num_heads_kv, batch, causal, tiles):
    case = Case(seqlen_q, seqlen_k, head_dim, causal, group * num_heads_kv, num_heads_kv, batch)
    inputs = case.inputs(torch.float64, dlse=True)
    if case.seqlen_k == 0:  # the formula's own reductions need a key
        results = run_blockwise(inputs, *tiles, causal)
        assert (
            all((x == 0).all() for x in (results[0], *results[2:])) and results[1].isneginf().all()
        )
    else:
        assert_equals_float64(
            run_blockwise(inputs, *tiles, causal), run_float64(inputs, causal=causal)
        )
