"""Windows, chunks, capped scores and sinks on CPU: by brute force, against the formula, and all of them together."""

import math

import pytest
import torch
from attention_math import attention_math, run_flash3, run_float64, run_same_dtype, seen_keys
from cases import HALF_DTYPES, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_as_accurate
from varlen_cases import SMALL, Batch

import flash3
from flash3 import reference
from flash3.mask import Mask

F64 = torch.float64
EXACT = {"rtol": 1e-9, "atol": 1e-10}  # two float64 computations in different order
NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")

WINDOWS = [(0, 0), (3, 0), (-1, 2), (4, -1), (5, 3), (0, 9), (1000, 2), (2, 1000)]
CHUNKS = [1, 2, 5, 16, 1000]
LENGTHS = [(9, 9), (5, 14), (14, 5), (1, 20), (20, 1)]
EVERYTHING = {"window_size": (6, 2), "attention_chunk": 9, "softcap": 0.7}
COMBINATIONS = [
    {"window_size": (4, 1)},
    {"window_size": (4, 1), "causal": True},
    {"attention_chunk": 5},
    {"attention_chunk": 5, "causal": True},
    {"softcap": 0.5},
    {"softcap": 0.5, "causal": True},
    EVERYTHING,
    {**EVERYTHING, "causal": True},
]


def sink_of(heads, dtype=F64):
    return torch.randn(heads, generator=torch.Generator().manual_seed(3), dtype=F64).to(dtype)


def assert_equals(result, right):
    for name in NAMES:
        x, expected = getattr(result, name), getattr(right, name)
        assert (x is None) == (expected is None), name
        if x is not None:
            torch.testing.assert_close(x, expected, **EXACT, msg=lambda m, n=name: f"{n}: {m}")


def sees(i, j, lengths, causal, window, chunk):
    """The definition, for one query and one key."""
    p = i + lengths[1] - lengths[0]
    left, right = window
    return (
        (not causal or j <= p)
        and (left == -1 or j >= p - left)
        and (right == -1 or j <= p + right)
        and (chunk == 0 or math.floor(p / chunk) == math.floor(j / chunk))
    )


MASKS = [((left, right), 0) for left, right in WINDOWS]
MASKS += [((-1, -1), chunk) for chunk in CHUNKS] + [((5, 3), 4), ((7, 0), 16), ((-1, 1), 3)]


@pytest.mark.parametrize(("window", "chunk"), MASKS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_masks_by_brute_force(lengths, causal, window, chunk):
    """One query and one key at a time, the reference's predicate and the range of keys it visits."""
    seqlen_q, seqlen_k = lengths
    right = [
        [sees(i, j, lengths, causal, window, chunk) for j in range(seqlen_k)]
        for i in range(seqlen_q)
    ]
    assert seen_keys(*lengths, causal, window, chunk).tolist() == right
    mask = Mask.of_call(lengths, causal, *window, chunk)
    for size in (1, 3, seqlen_q):
        for start in range(0, seqlen_q, size):
            rows = slice(start, min(start + size, seqlen_q))
            keys = mask.keys(rows)
            visible = [
                j
                for j in range(seqlen_k)
                if any(right[i][j] for i in range(*rows.indices(seqlen_q)))
            ]
            # All that is seen lies in the range, and nothing else at its ends: cost follows the keys that are seen.
            assert all(keys.start <= j < keys.stop for j in visible)
            if visible and size == 1:
                assert (keys.start, keys.stop - 1) == (visible[0], visible[-1])
            if not visible:
                assert keys.stop - keys.start <= size
            for n in range(keys.start, keys.stop):
                scores = torch.zeros(rows.stop - rows.start, 1)
                mask.hide(scores, rows, slice(n, n + 1))
                assert (scores[:, 0] == 0).tolist() == [
                    right[i][n] for i in range(rows.start, rows.stop)
                ]


@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_everything_by_brute_force(lengths, causal):
    """Row by row and key by key, with loops, as the definitions say."""
    seqlen_q, seqlen_k = lengths
    q, k, v = (torch.randn(1, s, 1, 8, dtype=F64) for s in (seqlen_q, seqlen_k, seqlen_k))
    sink, scale, cap, window, chunk = 0.3, 0.5, 1.5, (3, 1), 4
    out, lse = reference.attention_forward(
        q, k, v, scale, causal, torch.tensor([sink]), *window, chunk, cap, tile_m=2, tile_n=2
    )
    for i in range(seqlen_q):
        keys = [j for j in range(seqlen_k) if sees(i, j, lengths, causal, window, chunk)]
        products = [scale * float(q[0, i, 0] @ k[0, j, 0]) for j in keys]
        weights = [math.exp(cap * math.tanh(s / cap)) for s in products]
        total = sum(weights) + math.exp(torch.tensor(sink).item())
        expected = torch.zeros(8, dtype=F64)
        for w, j in zip(weights, keys, strict=True):
            expected += w / total * v[0, j, 0]
        torch.testing.assert_close(out[0, i, 0], expected)
        assert lse[0, 0, i].item() == pytest.approx(math.log(total))


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("arguments", COMBINATIONS, ids=str)
@pytest.mark.parametrize("lengths", [(13, 13), (7, 30), (30, 7)], ids=str)
def test_formula(lengths, arguments, heads, with_sink):
    inputs = Case(*lengths, 8, False, *heads).inputs(F64, dlse=True)
    arguments = {**arguments, "learnable_sink": sink_of(heads[0]) if with_sink else None}
    assert_equals(run_flash3(inputs, **arguments), run_float64(inputs, **arguments))


@pytest.mark.parametrize("tiles", [(1, 1), (3, 5), (4, 4), (16, 7)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_every_tiling_gives_the_formula(tiles, causal):
    inputs = Case(17, 23, 8, num_heads_q=4).inputs(F64, dlse=True)
    q, k, v = inputs.q, inputs.k, inputs.v
    sink, scores = sink_of(4), (6, 2, 9, 0.7)
    sizes = {"tile_m": tiles[0], "tile_n": tiles[1]}
    out, lse = reference.attention_forward(q, k, v, 0.5, causal, sink, *scores, **sizes)
    grads = reference.attention_backward(
        inputs.dout, q, k, v, out, lse, inputs.dlse, 0.5, causal, *scores, **sizes
    )
    right = run_float64(inputs, softmax_scale=0.5, causal=causal, learnable_sink=sink, **EVERYTHING)
    for name, x in zip(NAMES, (out, lse, *grads), strict=False):
        torch.testing.assert_close(x, getattr(right, name), **EXACT)


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [
        {"window_size": (40, 0)},
        {"window_size": (17, 33)},
        {"attention_chunk": 50},
        {"softcap": 2.0},
        {"window_size": (70, 10), "attention_chunk": 100, "softcap": 20.0},
    ],
    ids=str,
)
def test_low_precision_is_as_accurate_as_torch(arguments, causal, dtype):
    inputs = Case(150, 193, 64, num_heads_q=4, batch=1).inputs(dtype, dlse=True)
    arguments = {**arguments, "causal": causal, "learnable_sink": sink_of(4, torch.float32)}
    results = [run(inputs, **arguments) for run in (run_flash3, run_float64, run_same_dtype)]
    assert_as_accurate(*results, inputs)


@pytest.mark.parametrize("with_sink", [False, True])
def test_rows_without_a_key(with_sink):
    """In front of the first chunk, and beyond the window's reach: out is 0, lse the sink or -inf, gradients 0."""
    inputs = Case(14, 5, 8).inputs(F64, dlse=True)
    sink = sink_of(2) if with_sink else None
    blind = ~seen_keys(14, 5, False, (2, 2), 3).any(-1)
    assert 5 < blind.sum() < 14
    result = run_flash3(inputs, window_size=(2, 2), attention_chunk=3, learnable_sink=sink)
    assert (result.out[:, blind] == 0).all() and (result.dq[:, blind] == 0).all()
    lse = result.lse[..., blind]
    assert (
        torch.equal(lse, sink[None, :, None].expand_as(lse))
        if with_sink
        else (lse == -math.inf).all()
    )
    assert all(x.isfinite().all() for x in (result.dq, result.dk, result.dv))


def test_nan_in_the_lse_gradient_of_rows_without_a_key_has_no_effect():
    inputs = Case(14, 5, 8).inputs(F64, dlse=True)
    inputs.dlse[..., :9] = math.nan  # rows without a key, under a causal mask
    sink = torch.full((2,), -math.inf, dtype=F64)
    result = run_flash3(inputs, causal=True, learnable_sink=sink)
    assert all(x.isfinite().all() for x in (result.dq, result.dk, result.dv))
    assert (result.dsink == 0).all()


@pytest.mark.parametrize("extent", [(0, 5), (7, 0), (0, 0)], ids=str)
def test_empty_extents(extent):
    inputs = Case(*extent, 8).inputs(F64, dlse=True)
    result = run_flash3(inputs, learnable_sink=sink_of(2), **EVERYTHING)
    assert (result.out == 0).all() and (result.dq == 0).all()
    assert torch.equal(result.lse, sink_of(2)[None, :, None].expand_as(result.lse))
    torch.testing.assert_close(result.dsink, inputs.dlse.sum((0, 2)))


def test_a_window_costs_what_it_sees(monkeypatch):
    """Scores of 300 rows by 4,000 keys are never all computed."""
    counted = []
    real = reference._scores

    def counting(q_block, k_block, *rest):
        counted.append(q_block.shape[1] * k_block.shape[1])
        return real(q_block, k_block, *rest)

    monkeypatch.setattr(reference, "_scores", counting)
    q, k, v = (torch.randn(1, s, 1, 8) for s in (300, 4000, 4000))
    for arguments in ({"window_size": (50, 50)}, {"attention_chunk": 50}):
        counted.clear()
        flash3.flash_attn_func(q, k, v, **arguments)
        assert sum(counted) <= 300 * (100 + reference.TILE_M)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(4, 5), (5, 3)], ids=str)
def test_gradcheck(lengths, causal):
    inputs = Case(*lengths, 8, num_heads_q=2, num_heads_kv=1, batch=1).inputs(F64)
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, sink_of(2))]

    def attention(q, k, v, sink):
        return flash3.flash_attn_func(
            *(q, k, v, 0.4, causal), window_size=(2, 1), attention_chunk=4, softcap=0.9,
            learnable_sink=sink, return_lse=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(attention, tensors)


def test_gradcheck_of_packed_sequences():
    batch = Batch("check", (3, 0, 4), (2, 1, 5), behind=1, head_dim=8, num_heads_kv=1)
    packed = batch.tensors(F64)
    tensors = [x.requires_grad_() for x in (packed.q, packed.k, packed.v, sink_of(2))]

    def attention(q, k, v, sink):
        out, lse = flash3.flash_attn_varlen_func(
            *(q, k, v, packed.cu_seqlens_q, packed.cu_seqlens_k, 4, 5), window_size=(2, 1),
            attention_chunk=4, softcap=0.9, learnable_sink=sink, return_lse=True,
        )  # fmt: skip
        return out, lse.masked_fill(lse.isneginf(), 0.0)

    assert torch.autograd.gradcheck(attention, tensors)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("arguments", [{}, *COMBINATIONS], ids=str)
@pytest.mark.parametrize("batch", SMALL, ids=str)
def test_packed_sequences_each_by_itself(batch, arguments, with_sink):
    packed = batch.with_(head_dim=8, num_heads_q=4).tensors(F64, dlse=True)
    arguments = {**arguments, "learnable_sink": sink_of(4) if with_sink else None}
    assert_equals(packed.run(**arguments), packed.by_formula(F64, **arguments))


@pytest.mark.parametrize("filler", [math.nan, math.inf])
@pytest.mark.parametrize("batch", SMALL, ids=str)
def test_rows_that_no_sequence_uses_have_no_effect(batch, filler):
    packed = batch.tensors(torch.float32, dlse=True)
    arguments = {**EVERYTHING, "learnable_sink": sink_of(2, torch.float32)}
    clean, poisoned = (x.run(**arguments) for x in (packed, packed.poisoned(filler)))
    for name in NAMES:
        assert torch.equal(getattr(clean, name), getattr(poisoned, name)), name
    rows, keys = ~packed.used(0), ~packed.used(1)
    assert (poisoned.out[rows] == 0).all() and (poisoned.lse[:, rows] == -math.inf).all()
    assert all((x == 0).all() for x in (poisoned.dq[rows], poisoned.dk[keys], poisoned.dv[keys]))


def test_sink_alone_wants_a_gradient():
    inputs = Case(6, 9, 8).inputs(F64)
    sink = sink_of(2).requires_grad_()
    out = flash3.flash_attn_func(inputs.q, inputs.k, inputs.v, learnable_sink=sink)
    (dsink,) = torch.autograd.grad(out, sink, inputs.dout)
    right = attention_math(inputs.q, inputs.k, inputs.v, learnable_sink=sink)[0]
    torch.testing.assert_close(dsink, torch.autograd.grad(right, sink, inputs.dout)[0], **EXACT)


def test_qkv_in_one_tensor():
    qkv = torch.randn(2, 9, 3, 4, 16, dtype=F64, requires_grad=True)
    sink = sink_of(4)
    results = [
        function(*tensors, learnable_sink=sink, causal=True, **EVERYTHING)
        for function, tensors in (
            (flash3.flash_attn_qkvpacked_func, (qkv,)),
            (flash3.flash_attn_func, qkv.unbind(2)),
        )
    ]
    assert torch.equal(*results)
    assert torch.equal(*(torch.autograd.grad(x.sin().sum(), qkv)[0] for x in results))


@settings(max_examples=40)
@given(
    lengths=st.tuples(st.integers(0, 40), st.integers(1, 40)),
    window=st.tuples(st.integers(-1, 45), st.integers(-1, 45)),
    chunk=st.integers(0, 45),
    softcap=st.sampled_from([0.0, 0.5, 30.0]),
    causal=st.booleans(),
    with_sink=st.booleans(),
    tiles=st.tuples(st.integers(3, 40), st.integers(3, 40)),
)
def test_drawn_calls(lengths, window, chunk, softcap, causal, with_sink, tiles):
    inputs = Case(*lengths, 8, num_heads_q=4).inputs(F64, dlse=True)
    q, k, v = inputs.q, inputs.k, inputs.v
    sink = sink_of(4) if with_sink else None
    sizes = {"tile_m": tiles[0], "tile_n": tiles[1]}
    out, lse = reference.attention_forward(
        q, k, v, 0.4, causal, sink, *window, chunk, softcap, **sizes
    )
    grads = reference.attention_backward(
        inputs.dout, q, k, v, out, lse, inputs.dlse, 0.4, causal, *window, chunk, softcap, **sizes
    )
    right = run_float64(
        inputs,
        softmax_scale=0.4,
        causal=causal,
        window_size=window,
        attention_chunk=chunk,
        softcap=softcap,
        learnable_sink=sink,
    )
    for name, x in zip(NAMES, (out, lse, *grads), strict=False):
        torch.testing.assert_close(x, getattr(right, name), **EXACT)
