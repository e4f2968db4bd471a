"""Ring, all-gather and Ulysses attention over gloo against one process, in float64."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from distributed_cases import FUNCTIONS, NAMES, Case, on_many_ranks, on_one_rank, put_together
from ranks import run_processes, run_threads
from tolerance import max_abs, max_error
from torch.distributed.device_mesh import init_device_mesh

import flash3
from flash3.distributed import (
    allgather_attn_func,
    allgather_attn_varlen_func,
    layout,
    position_ids,
    ring_attn_func,
    shard_sequence,
    ulysses_attn_func,
    ulysses_attn_varlen_func,
    unshard_sequence,
)
from flash3.distributed.communicator import communicator

SIZES = (2, 3, 4, 8)


def cases(size: int) -> list[Case]:
    found = []
    for function in FUNCTIONS:
        for causal in (False, True):
            found.append(Case(function, causal, heads_q=2 * size, heads_kv=2 * size))
            found.append(Case(function, causal, order="contiguous", heads_q=size, heads_kv=1))
        grouped = Case(function, True, heads_q=4 * size, heads_kv=size, batch=1, dlse=False)
        cross = Case(function, False, "contiguous", 3, 5, heads_q=size, heads_kv=1)
        other_v = Case(function, True, heads_q=size, heads_kv=size, head_dim=24, head_dim_v=16)
        found += [grouped, cross, other_v]
    found += [Case(function, True, heads_q=6, heads_kv=2) for function in ("ring", "allgather")]
    return found


def compute(rank: int, size: int) -> dict:
    mesh = init_device_mesh("cpu", (size,))
    results = {}
    for position, case in enumerate(cases(size)):
        group = (None, dist.group.WORLD, mesh)[position % 3]
        results[case] = on_many_ranks(case, group, rank, size, torch.float64)
    return results


@pytest.fixture(scope="module")
def by_processes():
    """Results of all ranks for each number of ranks, computed once."""
    done: dict[int, list] = {}

    def of(size: int) -> list:
        if size not in done:
            done[size] = run_processes(size, compute)
        for outcome in done[size]:
            assert not isinstance(outcome, str), outcome
        return done[size]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_ranks_compute_what_one_process_does(by_processes, size):
    results = by_processes(size)
    for case in cases(size):
        whole = put_together([part[case] for part in results], case)
        right = on_one_rank(case, size, torch.float64)
        for name in NAMES:
            torch.testing.assert_close(
                whole[name], right[name], rtol=1e-12, atol=1e-12, msg=lambda m, n=name, c=case: f"{c}, {n}: {m}"
            )  # fmt: skip


@pytest.mark.slow
def test_threads_stand_for_processes_to_the_bit(by_processes):
    size = 3
    results = by_processes(size)
    for case in cases(size):
        threads = run_threads(
            size, lambda comm, c=case: on_many_ranks(c, comm, comm.rank, size, torch.float64)
        )
        for rank, part in enumerate(threads):
            for name in NAMES:
                assert torch.equal(part[name], results[rank][case][name]), (case, rank, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_dtype(function, dtype):
    size, case = 4, Case(function, True, seqlen_q=32, seqlen_k=32, heads_q=8, heads_kv=4)
    threads = run_threads(size, lambda comm: on_many_ranks(case, comm, comm.rank, size, dtype))
    whole, alone = put_together(threads, case), on_one_rank(case, size, dtype)
    right = on_one_rank(case, size, dtype, torch.float64)
    for name in NAMES:
        assert whole[name].dtype == alone[name].dtype
        # Parts are rounded before they are added: as good as one call, and a unit in the last place for that.
        of_parts, of_one = (max_error(x[name], right[name]) for x in (whole, alone))
        unit = torch.finfo(alone[name].dtype).eps * max_abs(right[name])
        assert of_parts <= 2 * of_one + unit, name


DOCUMENTS = (5, 0, 17, 1, 30, 8)  # of 64 tokens: three belong to none


def packed_inputs(size: int, dtype=torch.float64, device="cpu"):
    case = Case("allgather", True, seqlen_q=64 // size, seqlen_k=64 // size, heads_q=4, heads_kv=2)
    q, k, v, dout, dlse = (x[0] for x in case.inputs(size, dtype, device))
    cu_seqlens = torch.tensor([0, *DOCUMENTS], device=device).cumsum(0, dtype=torch.int32)
    return q, k, v, dout, dlse, cu_seqlens


@pytest.mark.parametrize("function", [allgather_attn_varlen_func, ulysses_attn_varlen_func])
@pytest.mark.parametrize("order", layout.ORDERS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_packed_documents(size, causal, order, function):
    """Documents that begin and end anywhere in a rank's shard are those of one process."""
    *whole, cu_seqlens = packed_inputs(size)
    leaves = [x.requires_grad_() for x in whole[:3]]
    lengths = cu_seqlens, cu_seqlens, 30, 30
    right = flash3.flash_attn_varlen_func(*leaves, *lengths, causal=causal, return_lse=True)
    right += torch.autograd.grad(right, leaves, whole[3:])

    def on_a_rank(comm):
        q, k, v, dout = (layout.shard(x.detach(), comm.rank, size, 0, order) for x in whole[:4])
        dlse = layout.shard(whole[4], comm.rank, size, 1, order)
        qkv = [x.requires_grad_() for x in (q, k, v)]
        results = function(*qkv, cu_seqlens, comm, causal=causal, order=order, return_lse=True)
        results += torch.autograd.grad(results, qkv, (dout, dlse))
        return [
            unshard_sequence(x.detach(), comm, int(i == 1), order=order)
            for i, x in enumerate(results)
        ]

    for ours in run_threads(size, on_a_rank):
        for x, y in zip(ours, right, strict=True):
            torch.testing.assert_close(x, y.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [allgather_attn_varlen_func, ulysses_attn_varlen_func])
def test_bad_packed_documents(function):
    q, k, v, _, _, cu_seqlens = packed_inputs(2)
    bad = {
        "cu_seqlens_q: dtype": (q, k, v, cu_seqlens.long()),
        "must hold the same positions": (q, k[:-2], v[:-2], cu_seqlens),
        "must be even": (q[:7], k[:7], v[:7], cu_seqlens),
        "q: must be (rows, heads, head_dim)": (q[None], k, v, cu_seqlens),
    }
    for words, arguments in bad.items():
        for message in run_threads(2, lambda comm, a=arguments: _error(lambda: function(*a, comm))):
            assert words in message


def test_one_rank_is_a_plain_call():
    case = Case("ring", True)
    for function in FUNCTIONS:
        case = Case(function, True)
        (alone,) = run_threads(1, lambda comm, c=case: on_many_ranks(c, comm, 0, 1, torch.float64))
        right = on_one_rank(case, 1, torch.float64)
        for name in NAMES:
            torch.testing.assert_close(alone[name], right[name], rtol=1e-13, atol=1e-13)


def test_all_ranks_have_equal_work_in_zigzag_order():
    size = 8
    for rank in range(size):
        work = 0.0
        for source in range(size):
            block = layout.block(rank, source, True, "zigzag")
            halves = [
                1.0 if part is layout.Half.ALL else 0.5 for part in (block.queries, block.keys)
            ]
            work += halves[0] * halves[1] * (0.5 if block.causal else 1.0)
        assert work == size / 2


@pytest.mark.parametrize("order", layout.ORDERS)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_blocks_are_the_causal_mask(size, order):
    """Every pair of chunks is computed once, masked only on the diagonal, and no query meets a later key."""
    seen = {}
    for rank in range(size):
        mine = layout.chunks_of(rank, size, order)
        for source in range(size):
            block = layout.block(rank, source, True, order)
            if block is None:
                continue
            theirs = layout.chunks_of(source, size, order)
            for i in _chosen(block.queries, mine):
                for j in _chosen(block.keys, theirs):
                    if block.causal and j > i:
                        continue  # the mask of the local block hides it
                    assert (i, j) not in seen
                    seen[i, j] = block.causal and i == j
    count = len(layout.chunks_of_all(size, order))
    assert seen == {(i, j): i == j for i in range(count) for j in range(i + 1)}


def _chosen(half: layout.Half, chunks: tuple[int, ...]) -> tuple[int, ...]:
    if half is layout.Half.ALL:
        return chunks
    return chunks[:1] if half is layout.Half.FIRST else chunks[1:]


@pytest.mark.parametrize("order", layout.ORDERS)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shards_go_together_again(order, dim):
    size = 4
    x = torch.randn(16, 24, 8)

    def there_and_back(comm):
        part = shard_sequence(x, comm, dim, order=order)
        where = position_ids(part.shape[dim], comm, order=order)
        assert torch.equal(part, x.index_select(dim, where))
        return unshard_sequence(part, comm, dim, order=order)

    for whole in run_threads(size, there_and_back):
        assert torch.equal(whole, x)


def test_sharding_is_differentiable():
    x = torch.randn(1, 12, 2, requires_grad=True)
    run_threads(3, lambda comm: shard_sequence(x, comm).square().sum().backward())
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_a_length_that_does_not_divide_is_refused():
    (message, *_) = run_threads(
        2, lambda comm: _error(lambda: shard_sequence(torch.ones(1, 6), comm))
    )
    assert "multiple of 4 for 2 ranks in zigzag order, got 6" in message


def _error(call) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("function", [ring_attn_func, allgather_attn_func, ulysses_attn_func])
def test_bad_arguments(function):
    def tensors(seqlen=4, heads=2, **kwargs):
        return torch.ones(1, seqlen, heads, 8, **kwargs)

    bad = {
        "TypeError: q": lambda comm: function([1], tensors(), tensors(), comm),
        "order: must be one of zigzag, contiguous": lambda comm: function(
            tensors(), tensors(), tensors(), comm, order="striped"
        ),
        "must hold the same positions": lambda comm: function(
            tensors(), tensors(6), tensors(6), comm, causal=True
        ),
        "must be even": lambda comm: function(
            tensors(3), tensors(3), tensors(3), comm, causal=True
        ),
        "softmax_scale": lambda comm: function(
            tensors(), tensors(), tensors(), comm, softmax_scale=-1.0
        ),
        "causal: must be True or False": lambda comm: function(
            tensors(), tensors(), tensors(), comm, causal=1
        ),
    }
    for words, call in bad.items():
        for message in run_threads(2, lambda comm, c=call: _error(lambda: c(comm))):
            assert words in message


def test_heads_that_ulysses_cannot_divide():
    def call(heads_q, heads_kv):
        q, k = torch.ones(1, 4, heads_q, 8), torch.ones(1, 4, heads_kv, 8)
        return run_threads(4, lambda comm: _error(lambda: ulysses_attn_func(q, k, k, comm)))[0]

    assert "q: the number of heads must be a multiple of the number of ranks, 4, got 6" in call(
        6, 6
    )
    assert "k, v: the number of heads must be a multiple or a divisor" in call(12, 3)


@pytest.mark.parametrize(
    "value, words", [(0, "divisor"), (3, "divisor"), (1.0, "int"), (True, "int")]
)
def test_bad_heads_per_step(value, words):
    q = torch.ones(1, 4, 4, 8)
    call = lambda comm: _error(lambda: allgather_attn_func(q, q, q, comm, heads_per_step=value))  # noqa: E731
    assert words in run_threads(2, call)[0]


def test_groups_that_are_none():
    with pytest.raises(RuntimeError, match="init_process_group"):
        communicator(None)
    q = torch.ones(1, 4, 4, 8)
    with pytest.raises(RuntimeError, match="init_process_group"):
        ring_attn_func(q, q, q)


def test_unshard_says_that_it_has_no_gradient():
    x = torch.ones(1, 4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="no gradient"):
        run_threads(2, lambda comm: unshard_sequence(x, comm))


def uneven_shards(rank: int, size: int) -> str:
    q = torch.ones(1, 4 + 2 * (rank == 1), 2, 8)
    return _error(lambda: ring_attn_func(q, q, q, causal=True))


@pytest.mark.slow
def test_uneven_shards_are_refused_on_every_rank():
    for message in run_processes(2, _checked(uneven_shards)):
        assert "q: length of the local shard: must be the same on all ranks" in message[0]
        assert "rank 0: 4, rank 1: 6" in message[0]


def wrong_groups(rank: int, size: int) -> list[str]:
    q = torch.ones(1, 4, 2, 8)
    two_dimensions = init_device_mesh("cpu", (1, size))
    first_alone = dist.new_group([0])
    groups = [two_dimensions, "cp", *([first_alone] if rank == 1 else [])]
    return [_error(lambda g=group: ring_attn_func(q, q, q, g)) for group in groups]


@pytest.mark.slow
def test_wrong_groups():
    for messages in run_processes(2, _checked(wrong_groups)):
        (found,) = messages
        assert "group: a DeviceMesh must have one dimension, got 2" in found[0]
        assert "TypeError: group: must be a ProcessGroup, a DeviceMesh or None, got str" in found[1]
    assert "group: this process is not a member of it" in found[2]


class _checked:
    """Hides a text result from the harness, for which texts are failures."""

    def __init__(self, function):
        self.function = function

    def __call__(self, rank, size):
        return (self.function(rank, size),)


def one_rank_fails(rank: int, size: int) -> tuple[str, float]:
    q = torch.ones(1, 4, 2, 8, requires_grad=True)
    out = ring_attn_func(q, q, q, causal=True)
    start = time.monotonic()
    if rank == 1:
        return "failed on purpose", 0.0
    return _error(lambda: out.sum().backward()), time.monotonic() - start


@pytest.mark.slow
def test_a_rank_that_fails_does_not_hang_the_others():
    """The others are stopped by the group's timeout (or at once, by the closed connection)."""
    outcomes = run_processes(3, one_rank_fails, group_timeout=8, seconds=90)
    for rank in (0, 2):
        message, seconds = outcomes[rank]
        assert message.startswith("RuntimeError"), outcomes
        assert seconds < 30


def test_group_is_not_needed_to_import():
    assert flash3.distributed.ring_attn_func is ring_attn_func
