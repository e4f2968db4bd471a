"""Windows, chunks, capped scores and sinks: the kernels against the float64 formula, on all results, dsink too."""

import itertools
import math

import pytest
import torch
from attention_math import run_flash3, seen_keys
from cases import HALF_DTYPES, HEAD_DIMS, HEADS, WIDE_HEAD_DIMS, Case, both_masks, by_length
from gpu_tier import row_built
from hypothesis import given, settings
from hypothesis import strategies as st
from score_cases import CHUNKS, COMBINATIONS, SOFTCAPS, WINDOWS, check_dense, sink_of
from views import inside

BF16, F16 = torch.bfloat16, torch.float16
NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")
LENGTHS = [(128, 128), (193, 192), (513, 777), (777, 513), (1, 1025), (300, 77), (1024, 1024)]
GROUPED = {"num_heads_q": 4, "num_heads_kv": 2}


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, F16), (128, BF16)], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("case", by_length(LENGTHS, batch=1, **GROUPED), ids=str)
def test_windows(case, window, head_dim, dtype):
    check_dense(case.with_(head_dim=head_dim), dtype, window_size=window)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (128, F16), (192, BF16), (256, F16)])
@pytest.mark.parametrize("window", [(0, 0), (64, 64), (127, 0), (200, 31), (-1, 70)], ids=str)
@pytest.mark.parametrize("case", by_length(LENGTHS[1:5], batch=1, **GROUPED), ids=str)
def test_windows_of_other_rows(case, window, head_dim, dtype):
    check_dense(case.with_(head_dim=head_dim), dtype, window_size=window)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(1024, 0), (200, 200), (-1, 500)], ids=str)
@pytest.mark.parametrize("lengths", [(3001, 2999), (4096, 4096), (2, 16411), (1537, 4000)], ids=str)
def test_long_lengths(lengths, window, head_dim):
    check_dense(Case(*lengths, head_dim, num_heads_q=2, batch=1), BF16, window_size=window)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (128, BF16), (256, F16)], ids=str)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("case", by_length(LENGTHS[1:6], batch=1, **GROUPED), ids=str)
def test_chunks(case, chunk, head_dim, dtype):
    check_dense(case.with_(head_dim=head_dim), dtype, attention_chunk=chunk)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize(
    "case", by_length([(193, 192), (513, 777), (300, 77)], batch=1, **GROUPED), ids=str
)
def test_softcap(case, softcap, head_dim, dtype):
    check_dense(case.with_(head_dim=head_dim), dtype, softcap=softcap, dlse=True)


@pytest.mark.parametrize("magnitude", [3.0, 10.0])
@pytest.mark.parametrize("arguments", [{"softcap": 20.0}, *COMBINATIONS], ids=str)
@pytest.mark.parametrize("case", both_masks([Case(257, 300, d) for d in (64, 128, 256)]), ids=str)
def test_large_inputs(case, arguments, magnitude):
    """Scores far beyond the cap, where tanh is flat."""
    check_dense(case, BF16, magnitude=magnitude, **arguments)


@pytest.mark.parametrize("sink_dtype", ["q's", torch.float32], ids=str)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 192, 256])
@pytest.mark.parametrize("window", [(-1, -1), (90, 30)], ids=str)
@pytest.mark.parametrize(
    "case", by_length([(193, 192), (513, 777), (300, 77), (1, 1025)], **GROUPED), ids=str
)
def test_sinks(case, window, head_dim, dtype, sink_dtype):
    sink = sink_of(4, dtype if sink_dtype == "q's" else sink_dtype, "cuda")
    arguments = {} if window == (-1, -1) else {"window_size": window}
    check_dense(case.with_(head_dim=head_dim), dtype, dlse=True, learnable_sink=sink, **arguments)


@pytest.mark.parametrize("offset", [-100.0, 30.0, 100.0])
@pytest.mark.parametrize("case", both_masks([Case(200, 257, d) for d in (64, 128, 256)]), ids=str)
def test_extreme_sinks(case, offset):
    """So low that they do nothing, so high that they take all the weight."""
    sink = sink_of(2, torch.float32, "cuda", offset=offset)
    check_dense(case, BF16, dlse=True, learnable_sink=sink)
    check_dense(case, BF16, window_size=(50, 50), learnable_sink=sink)


@pytest.mark.parametrize("case", both_masks([Case(300, 77, d) for d in (64, 128, 256)]), ids=str)
def test_a_sink_of_minus_infinity_is_none(case, flash3_rows):
    flash3_rows(BF16, case.head_dim, case.causal)
    inputs = case.inputs(BF16, "cuda", dlse=True)
    blind = case.seqlen_q - case.seqlen_k if case.causal else 0
    inputs.dlse[..., :blind] = math.nan
    arguments = {"causal": case.causal, "deterministic": True}
    sink = torch.full((2,), -math.inf, device="cuda")
    plain, result = (run_flash3(inputs, learnable_sink=s, **arguments) for s in (None, sink))
    for name in NAMES[:-1]:
        torch.testing.assert_close(getattr(result, name), getattr(plain, name))
    assert (result.dsink == 0).all()


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arguments", COMBINATIONS, ids=str)
@pytest.mark.parametrize(
    "case",
    both_masks([Case(417, 530, d, batch=1, **GROUPED) for d in (64, 128, 256)]),
    ids=str,
)
def test_combinations(case, arguments, deterministic, with_sink):
    sink = sink_of(4, BF16, "cuda") if with_sink else None
    check_dense(
        case, BF16, dlse=True, deterministic=deterministic, learnable_sink=sink, **arguments
    )


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, *WIDE_HEAD_DIMS])
def test_head_dims(head_dim, dtype):
    sink = sink_of(4, torch.float32, "cuda")
    case = Case(113, 303, head_dim, causal=head_dim % 16 == 0, **GROUPED)
    check_dense(case, dtype, learnable_sink=sink, **COMBINATIONS[-1])


@pytest.mark.parametrize("head_dims", [(192, 128), (64, 256), (40, 72)], ids=str)
def test_another_head_dim_of_v(head_dims):
    case = Case(300, 400, head_dims[0], True, head_dim_v=head_dims[1], **GROUPED)
    sink = sink_of(4, torch.float32, "cuda")
    check_dense(case, BF16, dlse=True, learnable_sink=sink, **COMBINATIONS[-1])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [*HEADS, (8, 1)], ids=str)
def test_head_ratios(heads, head_dim, deterministic):
    """Few KV heads and many keys: clusters of CTAs, of which some may have no query to visit."""
    case = Case(409, 730, head_dim, True, *heads, batch=1)
    sink = sink_of(heads[0], torch.float32, "cuda")
    check_dense(case, BF16, deterministic=deterministic, window_size=(150, 0), learnable_sink=sink)


@pytest.mark.parametrize("batch", [1, 3, 7, 40])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_more_tiles_than_multiprocessors(head_dim, batch):
    case = Case(260, 331, head_dim, num_heads_q=8, batch=batch)
    check_dense(case, BF16, window_size=(90, 40))


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("lengths", "arguments"),
    [
        ((300, 77), {"window_size": (2, 2)}),  # queries before and behind all keys
        ((513, 100), {"attention_chunk": 64}),  # queries in front of the first chunk
        ((700, 300), {"window_size": (0, 0), "attention_chunk": 30}),
    ],
    ids=str,
)
def test_rows_without_a_key(lengths, arguments, head_dim, with_sink, flash3_rows):
    """out is 0, lse the sink or -inf, gradients 0; whole blocks of keys that no query sees have dk = dv = 0."""
    flash3_rows(BF16, head_dim, "local")
    inputs = Case(*lengths, head_dim).inputs(BF16, "cuda", dlse=True)
    sink = sink_of(2, torch.float32, "cuda") if with_sink else None
    seen = seen_keys(*lengths, device="cuda", **arguments)
    blind, unseen = ~seen.any(1), ~seen.any(0)
    if not with_sink:
        inputs.dlse[..., blind] = math.nan
    result = run_flash3(inputs, learnable_sink=sink, **arguments)
    assert (result.out[:, blind] == 0).all() and (result.dq[:, blind] == 0).all()
    assert (result.dk[:, unseen] == 0).all() and (result.dv[:, unseen] == 0).all()
    lse = result.lse[..., blind]
    expected = torch.tensor([-math.inf] * 2, device="cuda") if sink is None else sink
    torch.testing.assert_close(lse, expected[None, :, None].expand_as(lse))
    assert all(x.isfinite().all() for x in (result.dq, result.dk, result.dv))


@pytest.mark.parametrize("filler", [math.nan, math.inf])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "arguments", [{"window_size": (100, 0)}, {"attention_chunk": 128}], ids=str
)
def test_keys_out_of_reach_are_not_read(arguments, head_dim, filler, flash3_rows):
    """128 queries at the end of 1,024 keys. Cost goes by the keys that are seen, so far ones may hold anything."""
    flash3_rows(BF16, head_dim, "local")
    inputs = Case(128, 1024, head_dim, **GROUPED).inputs(BF16, "cuda")
    arguments = {**arguments, "deterministic": True}
    clean = run_flash3(inputs, **arguments)
    far = slice(0, 1024 - 128 - 100 - 192)
    inputs.k[:, far] = filler
    inputs.v[:, far] = filler
    spoilt = run_flash3(inputs, **arguments)
    for name in NAMES[:-1]:
        assert torch.equal(getattr(clean, name), getattr(spoilt, name)), name
    assert (spoilt.dk[:, far] == 0).all() and (spoilt.dv[:, far] == 0).all()


@pytest.mark.parametrize("filler", [math.nan, math.inf])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_memory_around_the_tensors_has_no_effect(head_dim, filler, flash3_rows):
    flash3_rows(BF16, head_dim, "local")
    inputs = Case(213, 317, head_dim, True, **GROUPED).inputs(BF16, "cuda")
    arguments = {**COMBINATIONS[-1], "causal": True, "deterministic": True}
    sink = sink_of(4, torch.float32, "cuda")
    clean = run_flash3(inputs, learnable_sink=sink, **arguments)
    around = torch.full((12,), filler, device="cuda")
    around[4:8] = sink
    surrounded = type(inputs)(
        *(inside(x, filler) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)), None
    )
    poisoned = run_flash3(surrounded, learnable_sink=around[4:8], **arguments)
    for name in NAMES:
        assert torch.equal(getattr(clean, name), getattr(poisoned, name)), name


@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("num_heads_kv", [8, 2, 1])
def test_repeats_are_bitwise_equal(num_heads_kv, head_dim, flash3_rows):
    flash3_rows(BF16, head_dim, "local")
    case = Case(1100, 1300, head_dim, True, 8, num_heads_kv)
    inputs = case.inputs(BF16, "cuda", dlse=True)
    arguments = {**COMBINATIONS[-1], "causal": True, "deterministic": True}
    sink = sink_of(8, BF16, "cuda")
    first, *others = (run_flash3(inputs, learnable_sink=sink, **arguments) for _ in range(60))
    for other, name in itertools.product(others, NAMES):
        assert torch.equal(getattr(first, name), getattr(other, name)), name


@settings(max_examples=120)
@given(
    lengths=st.tuples(st.integers(1, 700), st.integers(1, 700)),
    head_dim=st.sampled_from([*HEAD_DIMS, 192, 256]),
    group=st.integers(1, 8),
    num_heads_kv=st.integers(1, 4),
    batch=st.integers(1, 3),
    causal=st.booleans(),
    window=st.tuples(st.integers(-1, 750), st.integers(-1, 750)),
    chunk=st.one_of(st.just(0), st.integers(1, 750)),
    softcap=st.sampled_from([0.0, 1.0, 30.0]),
    with_sink=st.booleans(),
    dtype=st.sampled_from(HALF_DTYPES),
    dlse=st.booleans(),
    deterministic=st.booleans(),
)
def test_drawn_calls(
    lengths, head_dim, group, num_heads_kv, batch, causal, window, chunk, softcap, with_sink,
    dtype, dlse, deterministic,
):  # fmt: skip
    masks = "full", "causal", "local"
    rows = itertools.product(("fwd", "bwd"), masks)
    if not all(row_built(p, dtype, head_dim, mask) for p, mask in rows):
        return  # a filtered build; the named cases report what is not built
    case = Case(*lengths, head_dim, causal, group * num_heads_kv, num_heads_kv, batch)
    check_dense(
        case,
        dtype,
        dlse=dlse,
        deterministic=deterministic,
        window_size=window,
        attention_chunk=chunk,
        softcap=softcap,
        learnable_sink=sink_of(case.num_heads_q, dtype, "cuda") if with_sink else None,
    )
