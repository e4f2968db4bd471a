"""The kernels against the float64 formula, by the rule of tolerance.py, on out, lse, dq, dk and dv."""

import math

import pytest
import torch
from attention_math import Result, run_flash3, run_float64, run_same_dtype
from cases import (
    HALF_DTYPES,
    HEAD_DIMS,
    HEADS,
    LONG,
    MEDIUM,
    SHORT,
    TINY,
    WIDE_HEAD_DIMS,
    Case,
    both_masks,
    by_head_dim,
    by_heads,
    by_length,
)
from gpu_tier import row_built
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_as_accurate


def check(case: Case, dtype, *, dlse=False, magnitude=1.0, inputs=None, **arguments) -> Result:
    """Runs a case and applies the rule; skips what the build lacks, after checking the forward if that is there."""
    key = (dtype, case.head_dim, case.causal, "dense", case.head_dim_v)
    missing = [p for p in ("fwd", "bwd") if not row_built(p, *key)]
    if "fwd" in missing:
        pytest.skip("not built: forward row")
    backward = "bwd" not in missing
    inputs = inputs or case.inputs(dtype, "cuda", dlse=dlse, magnitude=magnitude)
    result = run_flash3(inputs, backward=backward, causal=case.causal, **arguments)
    arguments.pop("deterministic", None)
    right = run_float64(inputs, backward=backward, causal=case.causal, **arguments)
    torch_result = run_same_dtype(inputs, backward=backward, causal=case.causal, **arguments)
    assert_as_accurate(result, right, torch_result, inputs)
    if missing:
        pytest.skip("not built: backward row; the forward passed")
    return result


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", by_length([*TINY, *SHORT, *MEDIUM], num_heads_q=4), ids=str)
def test_lengths(case, head_dim, dtype):
    check(case.with_(head_dim=head_dim), dtype)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("case", by_length(LONG, num_heads_q=4, batch=1), ids=str)
def test_long_lengths(case, head_dim):
    check(case.with_(head_dim=head_dim), torch.bfloat16)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(
    "case", by_head_dim(HEAD_DIMS, seqlen_q=113, seqlen_k=303, num_heads_q=4), ids=str
)
def test_head_dims(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(
    "case", by_head_dim(WIDE_HEAD_DIMS, seqlen_q=113, seqlen_k=303, num_heads_q=4), ids=str
)
def test_wide_head_dims(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(
    "head_dims",
    [(192, 128), (184, 120), (136, 64), (128, 192), (64, 256), (40, 72), (96, 40), (256, 8)],
    ids=str,
)
@pytest.mark.parametrize(
    "case", by_length([(63, 97), (128, 128), (513, 777)], num_heads_q=4), ids=str
)
def test_another_head_dim_of_v(case, head_dims, dtype):
    """(192, 128) is that of multi-head latent attention."""
    head_dim, head_dim_v = head_dims
    check(case.with_(head_dim=head_dim, head_dim_v=head_dim_v), dtype, dlse=True)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("head_dim", [88, 96, 192, 256])
@pytest.mark.parametrize("case", by_length([*TINY, *SHORT, *MEDIUM], num_heads_q=4), ids=str)
def test_lengths_of_other_heads(case, head_dim, dtype):
    check(case.with_(head_dim=head_dim), dtype)


@pytest.mark.parametrize(
    "head_dims", [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)], ids=str
)
@pytest.mark.parametrize("case", by_heads(HEADS, seqlen_q=209, seqlen_k=330), ids=str)
def test_head_ratios(case, head_dims):
    head_dim, head_dim_v = head_dims
    check(case.with_(head_dim=head_dim, head_dim_v=head_dim_v), torch.bfloat16)


@pytest.mark.parametrize("batch", [1, 3, 7, 40])
@pytest.mark.parametrize(
    "case",
    both_masks([Case(129, 200, 64), Case(260, 131, 128), Case(260, 200, 192), Case(129, 400, 256)]),
    ids=str,
)
def test_more_tiles_than_multiprocessors(case, batch):
    """From one tile up to several rounds of the persistent scheduler."""
    check(case.with_(batch=batch, num_heads_q=8), torch.bfloat16)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize(
    "case", by_length([(1, 1), (77, 130), (300, 200), (513, 513)], num_heads_q=4), ids=str
)
def test_lse_gradient(case, head_dim, dtype, deterministic):
    check(case.with_(head_dim=head_dim), dtype, dlse=True, deterministic=deterministic)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_lse_gradient_alone(head_dim, flash3_rows):
    """Nothing but lse reaches the loss: dv must be exactly zero."""
    flash3_rows(torch.bfloat16, head_dim, False)
    inputs = Case(150, 210, head_dim).inputs(torch.bfloat16, "cuda", dlse=True)
    inputs.dout.zero_()
    assert (check(Case(150, 210, head_dim), torch.bfloat16, inputs=inputs).dv == 0).all()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("largest", [3, 30, 300])
@pytest.mark.parametrize("rise", ["at once", "steadily"])
@pytest.mark.parametrize("case", both_masks([Case(600, 1100), Case(700, 400)]), ids=str)
def test_scores_outgrow_those_of_earlier_keys(case, rise, largest, head_dim, dtype):
    """By little, by more than fp16 holds relative to them, and by more than exp2 does; in one block, or in most."""
    case = case.with_(head_dim=head_dim)
    inputs = case.inputs(dtype, "cuda")
    factors = torch.linspace(1, largest, case.seqlen_k, device="cuda")
    if rise == "at once":
        factors = torch.where(factors > factors.mean(), float(largest), 1.0)
    inputs.k.copy_(inputs.k * factors[:, None, None])
    check(case, dtype, inputs=inputs)


@pytest.mark.parametrize("softmax_scale", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("case", both_masks([Case(130, 190, 64), Case(130, 190, 128)]), ids=str)
def test_softmax_scale(case, softmax_scale):
    check(case, torch.bfloat16, softmax_scale=softmax_scale)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "case", by_length([(300, 77), (513, 512), (200, 1)], num_heads_q=4), ids=str
)
def test_rows_without_a_key(case, head_dim, flash3_rows):
    flash3_rows(torch.bfloat16, head_dim, case.causal)
    case = case.with_(head_dim=head_dim)
    inputs = case.inputs(torch.bfloat16, "cuda", dlse=True)
    blind = case.seqlen_q - case.seqlen_k if case.causal else 0
    inputs.dlse[..., :blind] = math.nan  # what log and exp of -inf tend to send back
    result = run_flash3(inputs, causal=case.causal)
    assert (result.out[:, :blind] == 0).all() and (result.dq[:, :blind] == 0).all()
    assert (result.lse[..., :blind] == -math.inf).all() and result.lse[..., blind:].isfinite().all()
    assert all(x.isfinite().all() for x in (result.dq, result.dk, result.dv))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("magnitude", [3.0, 10.0])
@pytest.mark.parametrize(
    "case", both_masks([Case(257, 300, d) for d in (64, 128, 192, 256)]), ids=str
)
def test_large_inputs(case, magnitude, dtype):
    check(case, dtype, magnitude=magnitude)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("case", both_masks([Case(200, 257, 64), Case(200, 257, 128)]), ids=str)
def test_outliers(case, dtype):
    """One channel, one key and one value far larger than the rest, as trained models have them."""
    inputs = case.inputs(dtype, "cuda")
    inputs.q[..., 3] *= 20
    inputs.k[:, 17] *= 20
    inputs.v[:, 101] *= 50
    check(case, dtype, inputs=inputs)


def test_one_key_with_all_the_weight(flash3_rows):
    """Scores so far apart that all other probabilities are 0 in float32."""
    flash3_rows(torch.bfloat16, 64, False)
    inputs = Case(70, 140, 64).inputs(torch.bfloat16, "cuda")
    inputs.q.fill_(4.0)
    inputs.k.fill_(-4.0)
    inputs.k[:, 99] = 4.0
    result = run_flash3(inputs)
    assert torch.equal(result.out, inputs.v[:, 99:100].expand_as(result.out))
    others = torch.arange(140, device="cuda") != 99
    assert (result.dv[:, others] == 0).all() and result.dq.isfinite().all()


@settings(max_examples=80)
@given(
    seqlen_q=st.integers(1, 700),
    seqlen_k=st.integers(1, 700),
    head_dim=st.sampled_from(HEAD_DIMS),
    group=st.integers(1, 8),
    num_heads_kv=st.integers(1, 4),
    batch=st.integers(1, 5),
    causal=st.booleans(),
    dtype=st.sampled_from(HALF_DTYPES),
    dlse=st.booleans(),
    deterministic=st.booleans(),
)
def test_drawn_shapes(
    seqlen_q, seqlen_k, head_dim, group, num_heads_kv, batch, causal, dtype, dlse, deterministic
):
    if not row_built("fwd", dtype, head_dim, causal) or not row_built(
        "bwd", dtype, head_dim, causal
    ):
        return  # a filtered build; the named cases report what is not built
    case = Case(seqlen_q, seqlen_k, head_dim, causal, group * num_heads_kv, num_heads_kv, batch)
    check(case, dtype, dlse=dlse, deterministic=deterministic)
