"""Windows, chunks, capped scores and sinks on packed sequences: each sequence by itself, and what has no effect."""

import itertools
import math

import pytest
import torch
from cases import HALF_DTYPES, HEAD_DIMS, WIDE_HEAD_DIMS
from gpu_tier import row_built
from hypothesis import given, settings
from hypothesis import strategies as st
from score_cases import CHUNKS, COMBINATIONS, SOFTCAPS, WINDOWS, check_packed, mask_of, sink_of
from varlen_cases import SMALL, Batch, both_masks

import flash3

BF16, F16 = torch.bfloat16, torch.float16
NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")
GROUPED = {"num_heads_q": 4, "num_heads_kv": 2}
EDGES = Batch("edges", (1, 64, 127, 128, 129, 193, 256), (1, 128, 130, 64, 129, 192, 255))
LONGER_Q = Batch("queries-longer", (300, 129, 64, 7), (77, 128, 1, 3))
LONGER_K = Batch("keys-longer", (1, 77, 200), (1025, 130, 513))
EMPTY = Batch("empty-ones", (0, 130, 0, 64, 0, 0, 200), (90, 0, 0, 64, 128, 0, 333))
ONE_LONG = Batch("one-long", (*[9] * 20, 2500, *[17] * 20), (*[9] * 20, 2500, *[17] * 20))
USED = Batch("seqused", (100, 0, 129, 64, 200), (130, 3, 0, 200, 64), 70, 131, 5)
MIXES = [EDGES, LONGER_Q, LONGER_K, EMPTY, ONE_LONG, USED]
EVERYTHING = COMBINATIONS[-1]


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (128, F16)], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("batch", both_masks(MIXES), ids=str)
def test_windows(batch, window, head_dim, dtype):
    check_packed(batch.with_(head_dim=head_dim), dtype, window_size=window)


@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize("window", [(63, 1), (200, 31)], ids=str)
@pytest.mark.parametrize("batch", both_masks(MIXES), ids=str)
def test_windows_of_wide_heads(batch, window, head_dim):
    check_packed(batch.with_(head_dim=head_dim), BF16, window_size=window)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("batch", both_masks([EDGES, LONGER_Q, USED]), ids=str)
def test_chunks(batch, chunk, head_dim):
    check_packed(batch.with_(head_dim=head_dim), BF16, attention_chunk=chunk)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("batch", both_masks([EDGES, EMPTY]), ids=str)
def test_softcap(batch, softcap, head_dim):
    check_packed(batch.with_(head_dim=head_dim), BF16, dlse=True, softcap=softcap)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("arguments", [{}, {"window_size": (90, 30)}], ids=str)
@pytest.mark.parametrize("batch", both_masks([*SMALL, *MIXES]), ids=str)
def test_sinks(batch, arguments, head_dim, dtype):
    batch = batch.with_(head_dim=head_dim, **GROUPED)
    sink = sink_of(4, torch.float32, "cuda")
    check_packed(batch, dtype, dlse=True, learnable_sink=sink, **arguments)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arguments", COMBINATIONS, ids=str)
@pytest.mark.parametrize("batch", both_masks([EDGES, USED]), ids=str)
def test_combinations(batch, arguments, head_dim, deterministic):
    batch = batch.with_(head_dim=head_dim, **GROUPED)
    sink = sink_of(4, BF16, "cuda")
    check_packed(
        batch, BF16, dlse=True, deterministic=deterministic, learnable_sink=sink, **arguments
    )


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, *WIDE_HEAD_DIMS])
def test_head_dims(head_dim):
    batch = EDGES.with_(head_dim=head_dim, causal=head_dim % 16 == 0, **GROUPED)
    check_packed(batch, BF16, learnable_sink=sink_of(4, BF16, "cuda"), **EVERYTHING)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (8, 1), (5, 5)], ids=str)
def test_head_ratios(heads, head_dim):
    batch = ONE_LONG.with_(
        head_dim=head_dim, causal=True, num_heads_q=heads[0], num_heads_kv=heads[1]
    )
    sink = sink_of(heads[0], torch.float32, "cuda")
    check_packed(batch, BF16, dlse=True, window_size=(200, 0), learnable_sink=sink)


@pytest.mark.parametrize("filler", [math.nan, math.inf])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("arguments", [{}, {"window_size": (33, 0)}, EVERYTHING], ids=str)
@pytest.mark.parametrize(
    "batch", [SMALL[4], USED, Batch("behind", (130, 70), (60, 200), behind=300)], ids=str
)
def test_rows_that_no_sequence_uses_have_no_effect(batch, arguments, head_dim, filler, flash3_rows):
    flash3_rows(BF16, head_dim, mask_of(False, **arguments), layout="packed")
    packed = batch.with_(head_dim=head_dim).tensors(BF16, "cuda", dlse=True)
    sink = sink_of(2, torch.float32, "cuda")
    arguments = {**arguments, "learnable_sink": sink, "deterministic": True}
    clean, poisoned = (x.run(**arguments) for x in (packed, packed.poisoned(filler)))
    for name in NAMES:
        assert torch.equal(getattr(clean, name), getattr(poisoned, name)), name
    rows, keys = ~packed.used(0), ~packed.used(1)
    assert (poisoned.out[rows] == 0).all() and (poisoned.lse[:, rows] == -math.inf).all()
    assert all((x == 0).all() for x in (poisoned.dq[rows], poisoned.dk[keys], poisoned.dv[keys]))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arguments", [{"window_size": (33, 0)}, EVERYTHING], ids=str)
def test_a_neighbour_full_of_nan_has_no_effect(arguments, head_dim, flash3_rows):
    flash3_rows(BF16, head_dim, "local", layout="packed")
    packed = Batch("neighbours", (70, 45, 130), (90, 77, 33), head_dim=head_dim).tensors(
        BF16, "cuda"
    )
    arguments = {**arguments, "deterministic": True}
    clean = packed.run(**arguments)
    rows, keys = packed.sequences()[1]
    for x, where in ((packed.q, rows), (packed.k, keys), (packed.v, keys), (packed.dout, rows)):
        x[where] = math.nan
    spoilt = packed.run(**arguments)
    for name, index in itertools.product(NAMES[:-1], (0, 2)):
        part = packed.sequences()[index][name in ("dk", "dv")]
        where = (slice(None), part) if name == "lse" else part
        assert torch.equal(getattr(clean, name)[where], getattr(spoilt, name)[where]), name


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arguments", [{"window_size": (64, 0)}, EVERYTHING], ids=str)
@pytest.mark.parametrize("lengths", [(1000, 1000), (200, 333), (300, 200)], ids=str)
def test_equal_lengths_are_bitwise_the_dense_call(lengths, arguments, head_dim, flash3_rows):
    flash3_rows(BF16, head_dim, "local")
    flash3_rows(BF16, head_dim, "local", layout="packed")
    q, k, v = (
        torch.randn(5, n, h, head_dim, device="cuda").to(BF16).requires_grad_()
        for n, h in ((lengths[0], 4), (lengths[1], 2), (lengths[1], 2))
    )
    sink = sink_of(4, torch.float32, "cuda")
    arguments = {**arguments, "learnable_sink": sink, "deterministic": True, "return_lse": True}
    dense, dense_lse = flash3.flash_attn_func(q, k, v, **arguments)
    ends = [torch.arange(6, dtype=torch.int32, device="cuda") * n for n in lengths]
    out, lse = flash3.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), *ends, *lengths, **arguments
    )
    assert torch.equal(out.view_as(dense), dense)
    assert torch.equal(lse.view(4, 5, -1).transpose(0, 1), dense_lse)
    dout = torch.randn_like(dense)
    wanted = torch.autograd.grad(dense, (q, k, v), dout)
    for x, y in zip(wanted, torch.autograd.grad(out.view_as(dout), (q, k, v), dout), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("batch", [ONE_LONG, EDGES], ids=str)
def test_repeats_are_bitwise_equal(batch, head_dim, flash3_rows):
    flash3_rows(BF16, head_dim, "local", layout="packed")
    batch = batch.with_(head_dim=head_dim, num_heads_q=8, num_heads_kv=2)
    packed = batch.tensors(BF16, "cuda", dlse=True)
    arguments = {**EVERYTHING, "learnable_sink": sink_of(8, BF16, "cuda"), "deterministic": True}
    first, *others = (packed.run(**arguments) for _ in range(40))
    for other, name in itertools.product(others, NAMES):
        assert torch.equal(getattr(first, name), getattr(other, name)), name


@pytest.mark.parametrize("head_dim", [64, 128])
def test_eight_thousand_short_sequences(head_dim, flash3_rows):
    """Against the dense kernels: sequence b of length 16, as b-th batch entry."""
    flash3_rows(BF16, head_dim, "local")
    flash3_rows(BF16, head_dim, "local", layout="packed")
    count, length = 8192, 16
    q, k, v = (torch.randn(count, length, 2, head_dim, device="cuda").to(BF16) for _ in "qkv")
    ends = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length
    arguments = {"window_size": (5, 2), "learnable_sink": sink_of(2, BF16, "cuda")}
    dense = flash3.flash_attn_func(q, k, v, **arguments)
    packed = flash3.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), ends, ends, length, length, **arguments
    )
    assert torch.equal(packed.view_as(dense), dense)


@pytest.mark.parametrize(
    "numbers", [(0, 500, 100, 400), (-7, 90, 2**31 - 1, 3), (5, 4, 3, 2), (400, 400, 400, 400)]
)
@pytest.mark.parametrize("arguments", [{"window_size": (33, 5)}, EVERYTHING], ids=str)
def test_wrong_numbers_touch_no_other_memory(numbers, arguments, flash3_rows):
    """Results are undefined, but what lies around the tensors is not read or written, and the call ends."""
    flash3_rows(BF16, 64, "local", layout="packed")
    ends = torch.tensor(numbers, dtype=torch.int32, device="cuda")
    used = torch.tensor((-3, 2**30, 70), dtype=torch.int32, device="cuda")
    q, k, v, dout = (torch.randn(400, 2, 64, device="cuda").to(BF16) for _ in "qkvd")
    sink = sink_of(2, torch.float32, "cuda").requires_grad_()
    for seqused in (None, used):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flash3.flash_attn_varlen_func(
            *(*leaves, ends, ends, 400, 400, seqused, seqused),
            deterministic=True,
            learnable_sink=sink,
            **arguments,
        )
        torch.autograd.grad(out, (*leaves, sink), dout)
    torch.cuda.synchronize()


def test_nothing_to_compute():
    q = torch.randn(9, 2, 64, device="cuda").to(BF16).requires_grad_()
    none = torch.empty(0, 2, 64, device="cuda", dtype=BF16, requires_grad=True)
    ends = torch.tensor((0, 4, 9), dtype=torch.int32, device="cuda")
    sink = sink_of(2, torch.float32, "cuda").requires_grad_()
    arguments = {**EVERYTHING, "learnable_sink": sink, "return_lse": True}
    out, lse = flash3.flash_attn_varlen_func(q, none, none, ends, ends * 0, 5, 5, **arguments)
    assert (out == 0).all() and torch.equal(lse, sink[:, None].expand(2, 9))
    dq, dsink = torch.autograd.grad(lse.sum() + out.sum(), (q, sink))
    assert (dq == 0).all() and (dsink == 9).all()
    out, lse = flash3.flash_attn_varlen_func(q, q, q, ends[:1], ends[:1], 5, 5, **arguments)
    assert (out == 0).all() and (lse == -math.inf).all()
    dq, dsink = torch.autograd.grad(lse.sum() + out.sum(), (q, sink))
    assert (dq == 0).all() and (dsink == 0).all()


@settings(max_examples=80)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=12),
    spare=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    behind=st.integers(0, 200),
    head_dim=st.sampled_from([*HEAD_DIMS, 192, 256]),
    group=st.integers(1, 8),
    num_heads_kv=st.integers(1, 3),
    causal=st.booleans(),
    window=st.tuples(st.integers(-1, 450), st.integers(-1, 450)),
    chunk=st.one_of(st.just(0), st.integers(1, 450)),
    softcap=st.sampled_from([0.0, 1.0, 30.0]),
    with_sink=st.booleans(),
    dtype=st.sampled_from(HALF_DTYPES),
    deterministic=st.booleans(),
)
def test_drawn_batches(
    lengths, spare, behind, head_dim, group, num_heads_kv, causal, window, chunk, softcap,
    with_sink, dtype, deterministic,
):  # fmt: skip
    rows = itertools.product(("fwd", "bwd"), ("full", "causal", "local"))
    if not all(row_built(p, dtype, head_dim, mask, "packed") for p, mask in rows):
        return  # a filtered build; the named cases report what is not built
    lengths_q, lengths_k = zip(*lengths, strict=True)
    heads = group * num_heads_kv
    batch = Batch(
        "drawn", lengths_q, lengths_k, *spare, behind, head_dim, causal, heads, num_heads_kv
    )
    check_packed(
        batch,
        dtype,
        dlse=True,
        deterministic=deterministic,
        window_size=window,
        attention_chunk=chunk,
        softcap=softcap,
        learnable_sink=sink_of(heads, dtype, "cuda") if with_sink else None,
    )
