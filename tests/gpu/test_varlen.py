"""Packed sequences: the kernels against the float64 formula on each sequence alone, and what must have no effect."""

import itertools
import math
import random

import pytest
import torch
from cases import HALF_DTYPES
from gpu_tier import row_built
from tolerance import assert_as_accurate
from varlen_cases import SMALL, Batch, Packed, both_masks

import flash3

BF16 = torch.bfloat16
NAMES = ("out", "lse", "dq", "dk", "dv")


def drawn(count: int, mean: float, seed: int) -> tuple[int, ...]:
    """Lengths as a batch of documents has them: many short ones, a few long ones."""
    draw = random.Random(seed)
    return tuple(int(draw.lognormvariate(math.log(mean) - 0.5, 1.0)) for _ in range(count))


MIXES = [
    Batch("edges", (1, 64, 127, 128, 129, 193, 256), (1, 128, 130, 64, 129, 192, 255)),
    Batch("queries-longer", (300, 129, 64, 7), (77, 128, 1, 3)),
    Batch("keys-longer", (1, 77, 200), (1025, 130, 513)),
    Batch("empty-ones", (0, 130, 0, 64, 0, 0, 200), (90, 0, 0, 64, 128, 0, 333)),
    Batch("documents", drawn(17, 250, 1), drawn(17, 250, 2)),
    Batch("one-long", (*[9] * 20, 2500, *[17] * 20), (*[9] * 20, 2500, *[17] * 20)),
    Batch("seqused", (100, 0, 129, 64, 200), (130, 3, 0, 200, 64), 70, 131, 5),
    Batch("behind", (130, 70), (60, 200), behind=300),
]


def check(batch: Batch, dtype, *, dlse=False, packed: Packed | None = None, **arguments):
    """Runs a batch and applies the rule of tolerance.py; skips what the build lacks, after checking the forward."""
    passes = ("fwd", "bwd") if batch.head_dim <= 256 else ("fwd",)
    key = dtype, batch.head_dim, batch.causal, "packed"
    missing = [name for name in passes if not row_built(name, *key)]
    if "fwd" in missing:
        pytest.skip("not built: forward row")
    backward = "bwd" in passes and not missing
    packed = packed or batch.tensors(dtype, "cuda", dlse=dlse)
    result = packed.run(backward=backward, causal=batch.causal, **arguments)
    arguments.pop("deterministic", None)
    by_formula = [
        packed.by_formula(kind, backward=backward, causal=batch.causal, **arguments)
        for kind in (torch.float64, dtype)
    ]
    assert_as_accurate(result, *by_formula, packed)
    if missing:
        pytest.skip("not built: backward row; the forward passed")
    return result


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128])
@pytest.mark.parametrize("batch", both_masks([*SMALL, *MIXES]), ids=str)
def test_lengths(batch, head_dim, dtype):
    check(batch.with_(head_dim=head_dim), dtype, dlse=head_dim in (64, 128))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("head_dim", [136, 192, 256])
@pytest.mark.parametrize("batch", both_masks(MIXES), ids=str)
def test_wide_heads(batch, head_dim, dtype):
    check(batch.with_(head_dim=head_dim), dtype)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (8, 1), (5, 5)], ids=str)
@pytest.mark.parametrize("batch", both_masks([MIXES[4], MIXES[6]]), ids=str)
def test_head_ratios(batch, heads, head_dim, deterministic):
    """(4, 1) and (8, 1): clusters of CTAs sum dK and dV."""
    batch = batch.with_(head_dim=head_dim, num_heads_q=heads[0], num_heads_kv=heads[1])
    check(batch, BF16, dlse=True, deterministic=deterministic)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_eight_thousand_short_sequences(causal, head_dim, flash3_rows):
    """Against the dense kernels: sequence b of length 16, as b-th batch entry."""
    flash3_rows(BF16, head_dim, causal)
    flash3_rows(BF16, head_dim, causal, layout="packed")
    count, length = 8192, 16
    q, k, v, dout = (
        torch.randn(count, length, 2, head_dim, device="cuda").to(BF16) for _ in "qkvd"
    )
    ends = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length
    results = []
    for dense in (True, False):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        if dense:
            out = flash3.flash_attn_func(*leaves, causal=causal, deterministic=True)
        else:
            out = flash3.flash_attn_varlen_func(
                *(x.flatten(0, 1) for x in leaves),
                *(ends, ends, length, length),
                causal=causal,
                deterministic=True,
            ).view_as(q)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1000, 1000), (200, 333), (300, 200)], ids=str)
def test_equal_lengths_are_bitwise_the_dense_call(lengths, causal, head_dim, flash3_rows):
    flash3_rows(BF16, head_dim, causal)
    flash3_rows(BF16, head_dim, causal, layout="packed")
    q, k, v = (
        torch.randn(5, n, h, head_dim, device="cuda").to(BF16).requires_grad_()
        for n, h in ((lengths[0], 4), (lengths[1], 2), (lengths[1], 2))
    )
    dense = flash3.flash_attn_func(q, k, v, causal=causal, deterministic=True, return_lse=True)
    ends = [torch.arange(6, dtype=torch.int32, device="cuda") * n for n in lengths]
    out, lse = flash3.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)),
        *ends,
        *lengths,
        causal=causal,
        deterministic=True,
        return_lse=True,
    )
    assert torch.equal(out.view_as(dense[0]), dense[0])
    assert torch.equal(lse.view(4, 5, -1).transpose(0, 1), dense[1])
    dout = torch.randn_like(dense[0])
    wanted = torch.autograd.grad(dense[0], (q, k, v), dout)
    for x, y in zip(wanted, torch.autograd.grad(out.view_as(dout), (q, k, v), dout), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("filler", [math.nan, math.inf])
@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("batch", both_masks([SMALL[4], MIXES[6], MIXES[7]]), ids=str)
def test_rows_that_no_sequence_uses_have_no_effect(batch, head_dim, filler, flash3_rows):
    flash3_rows(BF16, head_dim, batch.causal, layout="packed")
    packed = batch.with_(head_dim=head_dim).tensors(BF16, "cuda", dlse=True)
    arguments = {"causal": batch.causal, "deterministic": True}
    clean, poisoned = (x.run(**arguments) for x in (packed, packed.poisoned(filler)))
    for name in NAMES:
        assert torch.equal(getattr(clean, name), getattr(poisoned, name)), name
    rows, keys = ~packed.used(0), ~packed.used(1)
    assert (poisoned.out[rows] == 0).all() and (poisoned.lse[:, rows] == -math.inf).all()
    assert all((x == 0).all() for x in (poisoned.dq[rows], poisoned.dk[keys], poisoned.dv[keys]))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_a_neighbour_full_of_nan_has_no_effect(causal, head_dim, flash3_rows):
    passes = ("fwd", "bwd") if head_dim <= 256 else ("fwd",)
    flash3_rows(BF16, head_dim, causal, passes=passes, layout="packed")
    batch = Batch("neighbours", (70, 45, 130), (90, 77, 33), head_dim=head_dim, causal=causal)
    packed = batch.tensors(BF16, "cuda")
    arguments = {"causal": causal, "backward": "bwd" in passes}
    clean = packed.run(**arguments)
    rows, keys = packed.sequences()[1]
    for x, where in ((packed.q, rows), (packed.k, keys), (packed.v, keys), (packed.dout, rows)):
        x[where] = math.nan
    spoilt = packed.run(**arguments)
    for name in NAMES:
        x, y = getattr(clean, name), getattr(spoilt, name)
        if x is None:
            continue
        for index in (0, 2):
            part = packed.sequences()[index][name in ("dk", "dv")]
            where = (slice(None), part) if name == "lse" else part
            # dQ is summed in any order, but by at most two blocks of keys here, which commutes
            assert torch.equal(x[where], y[where]), name


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("batch", both_masks([MIXES[4], MIXES[5]]), ids=str)
def test_repeats_are_bitwise_equal(batch, head_dim, flash3_rows):
    flash3_rows(BF16, head_dim, batch.causal, layout="packed")
    batch = batch.with_(head_dim=head_dim, num_heads_q=8, num_heads_kv=2)
    packed = batch.tensors(BF16, "cuda", dlse=True)
    first, *others = (packed.run(causal=batch.causal, deterministic=True) for _ in range(40))
    for other, name in itertools.product(others, NAMES):
        assert torch.equal(getattr(first, name), getattr(other, name)), name


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_a_graph_replays_with_other_lengths(causal, head_dim, flash3_rows):
    flash3_rows(BF16, head_dim, causal, layout="packed")
    batch = Batch("graph", (100, 300, 20), (200, 100, 120), head_dim=head_dim, causal=causal)
    packed = batch.tensors(BF16, "cuda")
    other = [
        torch.tensor(x, dtype=torch.int32, device="cuda")
        for x in ((0, 7, 200, 400), (0, 250, 250, 420))
    ]
    leaves = [x.requires_grad_() for x in (packed.q, packed.k, packed.v)]

    def call():
        out = flash3.flash_attn_varlen_func(
            *leaves,
            packed.cu_seqlens_q,
            packed.cu_seqlens_k,
            *(300, 250),
            causal=causal,
            deterministic=True,
        )
        return out, *torch.autograd.grad(out, leaves, packed.dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for ends in ((packed.cu_seqlens_q.clone(), packed.cu_seqlens_k.clone()), other):
        packed.cu_seqlens_q.copy_(ends[0])
        packed.cu_seqlens_k.copy_(ends[1])
        graph.replay()
        for x, y in zip(captured, call(), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(
    "numbers", [(0, 500, 100, 400), (-7, 90, 2**31 - 1, 3), (5, 4, 3, 2), (400, 400, 400, 400)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_wrong_numbers_touch_no_other_memory(numbers, causal, flash3_rows):
    """Results are undefined, but what lies around the tensors is not read or written, and the call ends."""
    flash3_rows(BF16, 64, causal, layout="packed")
    ends = torch.tensor(numbers, dtype=torch.int32, device="cuda")
    used = torch.tensor((-3, 2**30, 70), dtype=torch.int32, device="cuda")
    q, k, v, dout = (torch.randn(400, 2, 64, device="cuda").to(BF16) for _ in "qkvd")
    for seqused in (None, used):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flash3.flash_attn_varlen_func(
            *leaves, ends, ends, 400, 400, seqused, seqused, causal=causal, deterministic=True
        )
        torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_strided_tensors(head_dim, flash3_rows):
    """q, k and v as slices of one packed projection; dout expanded."""
    flash3_rows(BF16, head_dim, True, layout="packed")
    ends = torch.tensor((0, 60, 250), dtype=torch.int32, device="cuda")
    qkv = torch.randn(250, 3, 4, head_dim, device="cuda").to(BF16).requires_grad_()

    def run(tensors):
        out = flash3.flash_attn_varlen_func(
            *tensors, ends, ends, 190, 190, causal=True, deterministic=True
        )
        return out, torch.autograd.grad(out.sum(), qkv)[0]

    for x, y in zip(run(qkv.unbind(1)), run([x.contiguous() for x in qkv.unbind(1)]), strict=True):
        assert torch.equal(x, y)


def test_nothing_to_compute():
    q = torch.randn(9, 2, 64, device="cuda").to(BF16).requires_grad_()
    none = torch.empty(0, 2, 64, device="cuda", dtype=BF16, requires_grad=True)
    ends = torch.tensor((0, 4, 9), dtype=torch.int32, device="cuda")
    for k, cu_q, cu_k in ((none, ends, ends * 0), (q, ends[:1], ends[:1])):
        out, lse = flash3.flash_attn_varlen_func(q, k, k, cu_q, cu_k, 5, 5, return_lse=True)
        assert (out == 0).all() and (lse == -math.inf).all()
        assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), (q, k)))
