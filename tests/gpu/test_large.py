"""Extents beyond 16 and 32 bits: batch 70,000, and tensors of more than 2^31 elements. Slices are checked."""

import pytest
import torch
from attention_math import Result, run_flash3, run_float64, run_same_dtype
from cases import Case, Inputs, both_masks
from tolerance import assert_as_accurate

BF16 = torch.bfloat16
BEYOND_INT32 = 2**31


@pytest.fixture(autouse=True)
def release_memory():
    yield
    torch.cuda.empty_cache()


def need_memory(gib: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib << 30:
        pytest.skip(f"needs {gib} GiB of free GPU memory, {free >> 30} are")


def random(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=BF16, device="cuda").normal_()


def assert_slice(inputs: Inputs, result: Result, batch: slice, heads: slice, causal: bool) -> None:
    """Batch entries and heads are independent of each other, so a slice is checked as a call of its own."""

    def cut(x):
        return None if x is None else x[batch, :, heads]

    part = Inputs(*(cut(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)), None)
    part_result = Result(
        cut(result.out), result.lse[batch, heads], *map(cut, (result.dq, result.dk, result.dv))
    )
    assert_as_accurate(
        part_result, run_float64(part, causal=causal), run_same_dtype(part, causal=causal), part
    )


@pytest.mark.parametrize(
    "case", both_masks([Case(3, 5, 64, batch=70_000), Case(130, 7, 8, batch=70_000)]), ids=str
)
def test_batch_70000(case, flash3_rows):
    flash3_rows(BF16, case.head_dim, case.causal)
    case = case.with_(num_heads_q=1, num_heads_kv=1)
    inputs = case.inputs(BF16, "cuda")
    result = run_flash3(inputs, causal=case.causal, deterministic=case.causal)
    for batch in (slice(0, 3000), slice(65_000, 70_000)):
        assert_slice(inputs, result, batch, slice(None), case.causal)


@pytest.mark.parametrize("causal", [False, True])
def test_batch_times_length_beyond_int32(causal, flash3_rows):
    """Every tensor of the call, and the float32 dQ sums, pass 2^31 elements."""
    flash3_rows(BF16, 128, causal)
    need_memory(64)
    batch, seqlen, heads, head_dim = 1030, 256, 64, 128
    assert batch * seqlen * heads * head_dim > BEYOND_INT32
    inputs = Inputs(*(random(batch, seqlen, heads, head_dim) for _ in range(4)), None)
    result = run_flash3(inputs, causal=causal)
    for entry in (0, 511, 1022, 1023, 1024, 1029):
        assert_slice(inputs, result, slice(entry, entry + 1), slice(None), causal)


def test_queries_beyond_int32(flash3_rows):
    """One sequence of 2^25 queries. Its rows are independent given k and v; dk and dv sum over all of them."""
    flash3_rows(BF16, 64, False)
    need_memory(48)
    seqlen_q, seqlen_k, head_dim = 2**25 + 100, 120, 64
    assert seqlen_q * head_dim > BEYOND_INT32
    q, dout = random(1, seqlen_q, 1, head_dim), random(1, seqlen_q, 1, head_dim)
    k, v = random(1, seqlen_k, 1, head_dim), random(1, seqlen_k, 1, head_dim)
    result = run_flash3(Inputs(q, k, v, dout, None))
    for rows in (slice(0, 300), slice(2**24 - 150, 2**24 + 150), slice(seqlen_q - 300, seqlen_q)):
        part = Inputs(q[:, rows], k, v, dout[:, rows], None)
        right, torch_result = run_float64(part), run_same_dtype(part)
        part_result = Result(result.out[:, rows], result.lse[..., rows], result.dq[:, rows])
        assert_as_accurate(part_result, right, torch_result, part)
    assert result.dk.isfinite().all() and result.dv.isfinite().all()


def test_keys_beyond_int32(flash3_rows):
    """16 heads of 2^21 keys each; one head is checked in full."""
    flash3_rows(BF16, 64, False)
    need_memory(64)
    seqlen_q, seqlen_k, heads, head_dim = 16, 2**21 + 100, 16, 64
    assert seqlen_k * heads * head_dim > BEYOND_INT32
    q, dout = random(1, seqlen_q, heads, head_dim), random(1, seqlen_q, heads, head_dim)
    k, v = random(1, seqlen_k, heads, head_dim), random(1, seqlen_k, heads, head_dim)
    inputs = Inputs(q, k, v, dout, None)
    result = run_flash3(inputs)
    for head in (0, heads - 1):
        assert_slice(inputs, result, slice(None), slice(head, head + 1), causal=False)


def test_stride_beyond_int32(flash3_rows):
    """A small call whose batch stride alone is more than 2^31 elements."""
    flash3_rows(BF16, 64, True)
    need_memory(8)
    room = torch.zeros(BEYOND_INT32 + 2**20, dtype=BF16, device="cuda")
    q = room.as_strided((2, 90, 2, 64), (BEYOND_INT32 + 64, 128, 64, 1))
    q.normal_()
    inputs = Inputs(q, random(2, 90, 2, 64), random(2, 90, 2, 64), random(2, 90, 2, 64), None)
    result = run_flash3(inputs, causal=True)
    assert_slice(inputs, result, slice(None), slice(None), causal=True)
