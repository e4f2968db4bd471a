"""The merge kernel; ranks as threads that share a GPU; and, where there are several, one rank per GPU by NCCL."""

import math

import pytest
import torch
from distributed_cases import FUNCTIONS, NAMES, Case, on_many_ranks, on_one_rank, put_together
from ranks import run_processes, run_threads
from tolerance import max_abs, max_error

import flash3
from flash3 import ops, reference
from flash3.distributed import (
    allgather_attn_varlen_func,
    layout,
    ring_attn_func,
    shard_sequence,
    unshard_sequence,
)

BF16, HALVES = torch.bfloat16, [torch.float16, torch.bfloat16]


def parts(shape, dtype, first_dtype):
    """out_1, lse_1, out_2, lse_2 with rows that see no key in one part, in the other, and in both."""
    batch, seqlen, heads, _ = shape
    outs = [torch.randn(shape, device="cuda").to(x) for x in (first_dtype, dtype)]
    lses = [4 * torch.randn(batch, heads, seqlen, device="cuda") for _ in outs]
    for row, (empty_1, empty_2) in enumerate([(True, False), (False, True), (True, True)]):
        for out, lse, empty in zip(outs, lses, (empty_1, empty_2), strict=True):
            if empty:
                out[:, row], lse[:, :, row] = 0, -math.inf
    return outs[0], lses[0], outs[1], lses[1]


@pytest.mark.parametrize("out_is_fp32", [False, True])
@pytest.mark.parametrize("first_is_fp32", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(2, 7, 3, 8), (1, 300, 5, 128), (3, 65, 2, 96), (1, 33, 4, 256)])
def test_merge_is_the_reference(shape, dtype, first_is_fp32, out_is_fp32):
    given = parts(shape, dtype, torch.float32 if first_is_fp32 else dtype)
    right, right_lse = reference.merge(*(x.double() for x in given))
    out = torch.full(shape, math.nan, device="cuda", dtype=torch.float32 if out_is_fp32 else dtype)
    lse = torch.full_like(given[1], math.nan)
    ops.merge(out, lse, *given)
    unit = torch.finfo(out.dtype).eps
    assert max_error(out, right) <= max(unit / 2, 1e-6) * 2 * max_abs(right)
    empty = right_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert max_error(lse[~empty], right_lse[~empty]) <= 1e-5
    assert not out.transpose(1, 2)[empty].any()


def test_merge_in_place_and_in_views():
    """As the ring calls it: the second half of the rows, over the first part."""
    first, lse_1, second, lse_2 = parts((2, 64, 3, 128), BF16, BF16)
    expected, expected_lse = torch.empty_like(first), torch.empty_like(lse_1)
    ops.merge(expected, expected_lse, first, lse_1, second, lse_2)
    out, lse = first.clone(), lse_1.clone()
    rows = slice(32, 64)
    out_rows, lse_rows = out[:, rows], lse[..., rows]
    ops.merge(out_rows, lse_rows, out_rows, lse_rows, second[:, rows], lse_2[..., rows])
    assert torch.equal(out[:, rows], expected[:, rows])
    assert torch.equal(lse[..., rows], expected_lse[..., rows])
    assert torch.equal(out[:, :32], first[:, :32])
    assert torch.equal(lse[..., :32], lse_1[..., :32])


def test_merge_beyond_two_to_the_31_elements():
    shape = (1, (1 << 31) // 1024 + 5, 8, 128)
    one = torch.ones(shape, device="cuda", dtype=BF16)
    lse = torch.zeros(1, 8, shape[1], device="cuda")
    out, merged = torch.zeros_like(one), torch.empty_like(lse)
    ops.merge(out, merged, one, lse, one, lse)
    assert (out == 1).all()
    torch.testing.assert_close(merged, torch.full_like(lse, math.log(2)))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"out_2": lambda x: x.float()}, "out_2: dtype"),
        ({"out_1": lambda x: x[:, :5]}, "out_1: shape"),
        ({"lse_2": lambda x: x.double()}, "lse_2: dtype must be float32"),
        ({"lse_1": lambda x: x.transpose(1, 2)}, "lse_1: shape"),
        ({"out": lambda x: x.cpu()}, "out"),
        ({"out_1": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2)}, "out_1: rows"),
    ],
)
def test_merge_refuses(change, words):
    names = ("out_1", "lse_1", "out_2", "lse_2")
    given = dict(zip(names, parts((1, 8, 2, 64), BF16, BF16), strict=True))
    given |= {"out": torch.empty_like(given["out_2"]), "lse": torch.empty_like(given["lse_2"])}
    for name, wrong in change.items():
        given[name] = wrong(given[name])
    with pytest.raises((RuntimeError, NotImplementedError), match=words):
        ops.merge(*(given[name] for name in ("out", "lse", *names)))


def as_accurate(whole, alone, right):
    """Parts are rounded before they are added: as good as one call, and a unit in the last place for that."""
    for name in NAMES:
        of_parts, of_one = (max_error(x[name], right[name]) for x in (whole, alone))
        floor = 1e-5 if name == "lse" else torch.finfo(alone[name].dtype).eps
        assert of_parts <= 2 * of_one + floor * max_abs(right[name]), name


CASES = [
    Case(function, causal, order, 320, 320, 8, heads_kv, head_dim, batch)
    for function in FUNCTIONS
    for causal, order, heads_kv, head_dim, batch in [
        (True, "zigzag", 4, 128, 2),
        (True, "contiguous", 8, 64, 1),
        (False, "zigzag", 4, 128, 1),
    ]
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_on_one_gpu(case, size, flash3_rows):
    flash3_rows(BF16, case.head_dim, case.causal)
    if case.causal:
        flash3_rows(BF16, case.head_dim, False)  # blocks off the diagonal have no mask
    ranks = run_threads(size, lambda comm: on_many_ranks(case, comm, comm.rank, size, BF16, "cuda"))
    whole = put_together(ranks, case)
    alone = on_one_rank(case, size, BF16, device="cuda")
    right = on_one_rank(case, size, BF16, torch.float64, device="cpu", drawn_on="cuda")
    as_accurate(whole, alone, {name: x.cuda() for name, x in right.items()})


@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_on_ranks_of_one_gpu(causal, flash3_rows):
    """Documents cut anywhere, against one call: the same keys in the same tiles but for where a chunk begins."""
    flash3_rows(BF16, 128, causal, layout="packed")
    size, case = (
        4,
        Case("allgather", causal, "zigzag", 512, 512, heads_q=8, heads_kv=2, head_dim=128),
    )
    q, k, v, dout, _ = (x[0] for x in case.inputs(size, BF16, "cuda"))
    lengths = torch.tensor(
        [0, 700, 1, 0, 333, 900], device="cuda"
    )  # the last 114 tokens belong to none
    cu_seqlens = lengths.cumsum(0, dtype=torch.int32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash3.flash_attn_varlen_func(*leaves, cu_seqlens, cu_seqlens, 900, 900, causal=causal)
    right = [out, *torch.autograd.grad(out, leaves, dout)]

    def on_a_rank(comm):
        shards = [layout.shard(x.detach(), comm.rank, size, 0, "zigzag") for x in (q, k, v, dout)]
        qkv = [x.requires_grad_() for x in shards[:3]]
        out = allgather_attn_varlen_func(*qkv, cu_seqlens, comm, causal=causal)
        results = out, *torch.autograd.grad(out, qkv, shards[3])
        return [unshard_sequence(x.detach(), comm, 0) for x in results]

    for ours in run_threads(size, on_a_rank):
        for x, y in zip(ours, right, strict=True):
            assert max_error(x, y.detach().double()) <= 2 * torch.finfo(BF16).eps * max_abs(y)


def test_ring_forward_is_bitwise_reproducible(flash3_rows):
    case = Case("ring", True, seqlen_q=512, seqlen_k=512, heads_q=8, heads_kv=4, head_dim=128)
    flash3_rows(BF16, 128, True)
    flash3_rows(BF16, 128, False)
    runs = [
        run_threads(4, lambda comm: on_many_ranks(case, comm, comm.rank, 4, BF16, "cuda"))
        for _ in range(2)
    ]
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a["out"], b["out"])
        assert torch.equal(a["lse"], b["lse"])


several_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
REAL = [
    case for case in CASES if case.causal
]  # the backward's sums are ordered only where they are asked to be


def on_real_ranks(rank: int, size: int) -> dict:
    return {
        case: {
            name: x.cpu() for name, x in on_many_ranks(case, None, rank, size, BF16, "cuda").items()
        }
        for case in REAL
    }


@several_gpus
def test_gpus_compute_what_threads_do(flash3_rows):
    """The exchanges between GPUs carry the same numbers: out and lse to the bit, gradients as accurate."""
    size = 2
    results = run_processes(size, on_real_ranks, backend="nccl")
    for outcome in results:
        assert not isinstance(outcome, str), outcome
    for case in REAL:
        threads = run_threads(
            size, lambda comm, c=case: on_many_ranks(c, comm, comm.rank, size, BF16, "cuda")
        )
        for rank, part in enumerate(threads):
            for name in ("out", "lse"):
                assert torch.equal(part[name].cpu(), results[rank][case][name]), (case, rank, name)
            for name in ("dq", "dk", "dv"):
                scale = max_abs(part[name])
                assert max_error(part[name].cpu(), results[rank][case][name].double()) <= 0.02 * scale  # fmt: skip


def long_sequence(rank: int, size: int) -> dict:
    """64k tokens over the ranks against one GPU, forward and backward, deterministic gradients."""
    torch.manual_seed(3)
    whole = [torch.randn(1, 1 << 16, h, 128, device="cuda", dtype=BF16) for h in (8, 2, 2, 8)]
    leaves = [shard_sequence(x).requires_grad_() for x in whole[:3]]
    out, lse = ring_attn_func(*leaves, causal=True, deterministic=True, return_lse=True)
    grads = torch.autograd.grad(out, leaves, shard_sequence(whole[3]))
    ours = [unshard_sequence(x.detach()) for x in (out, *grads)]
    ours.append(unshard_sequence(lse.detach(), dim=2))
    alone_leaves = [x.requires_grad_() for x in whole[:3]]
    alone, alone_lse = flash3.flash_attn_func(*alone_leaves, causal=True, return_lse=True)
    alone = [alone, *torch.autograd.grad(alone, alone_leaves, whole[3]), alone_lse]
    return {
        name: (max_error(x, y.double()), max_abs(y))
        for name, x, y in zip(("out", "dq", "dk", "dv", "lse"), ours, alone, strict=True)
    }


@several_gpus
def test_64k_tokens_over_the_gpus(flash3_rows):
    size = torch.cuda.device_count()
    for outcome in run_processes(size, long_sequence, backend="nccl"):
        assert not isinstance(outcome, str), outcome
        for name, (difference, scale) in outcome.items():
            # Two units in the last place of the largest element: each side rounds once, the parts once more.
            limit = 1e-5 if name == "lse" else 2 * torch.finfo(BF16).eps
            assert difference <= limit * scale, (name, difference, scale)


def one_million_tokens(rank: int, size: int) -> dict:
    """Causal attention to a value that counts positions: query i averages 0 ... i in its first column."""
    local = (1 << 20) // size
    torch.manual_seed(rank)
    q = torch.randn(1, local, 8, 128, device="cuda", dtype=BF16, requires_grad=True)
    k = torch.zeros(1, local, 2, 128, device="cuda", dtype=BF16, requires_grad=True)
    v = torch.ones(1, local, 2, 128, device="cuda", dtype=BF16, requires_grad=True)
    out, lse = ring_attn_func(q, k, v, causal=True, return_lse=True)
    positions = flash3.distributed.position_ids(local, device="cuda")
    out.float().mean().backward()
    return {
        "out": max_error(out, torch.ones_like(out).double()),
        "lse": max_error(lse[0, 0], torch.log(positions.double() + 1)),
        "finite": all(bool(x.grad.isfinite().all()) for x in (q, k, v)),
        "dv": v.grad.double().sum().item(),
    }


@several_gpus
@pytest.mark.slow
def test_one_million_tokens_over_the_gpus(flash3_rows):
    """Equal scores: out is the mean of ones, lse the log of the number of keys, and dv sums to the whole gradient."""
    size = torch.cuda.device_count()
    outcomes = run_processes(size, one_million_tokens, backend="nccl")
    for outcome in outcomes:
        assert not isinstance(outcome, str), outcome
        assert outcome["finite"]
        assert outcome["out"] <= torch.finfo(BF16).eps
        assert outcome["lse"] <= 2e-5 * math.log(1 << 20)
    total = sum(outcome["dv"] for outcome in outcomes)
    assert abs(total - size) <= 0.05 * size  # each rank's mean sends 1 in all
