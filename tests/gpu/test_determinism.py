"""Run-to-run bitwise equality: of the forward always, of the backward with deterministic=True."""

import pytest
import torch
from attention_math import run_flash3
from cases import HALF_DTYPES, Case, both_masks

import flash3

SMALL = both_masks([Case(200, 333, d, num_heads_q=4) for d in (40, 64, 96, 128)])
# Many key blocks add into the same dQ, on every multiprocessor at once, with grouped heads.
CONTENDED = both_masks(
    [
        Case(2048, 2048, d, num_heads_q=8, num_heads_kv=num_heads_kv)
        for d in (64, 96, 128, 192, 256)
        for num_heads_kv in (4, 1)  # 1: clusters of CTAs sum dK and dV
    ]
)


def assert_repeats(make, repeats: int) -> None:
    first = make()
    for repeat in range(repeats):
        for name, x, y in zip(("first", "second", "third"), first, make(), strict=False):
            assert torch.equal(x, y), f"the {name} result differs in repeat {repeat}"


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("case", [*SMALL, *CONTENDED], ids=str)
def test_forward(case, dtype, flash3_rows):
    flash3_rows(dtype, case.head_dim, case.causal, passes=("fwd",))
    inputs = case.inputs(dtype, "cuda")
    assert_repeats(
        lambda: flash3.flash_attn_func(
            inputs.q, inputs.k, inputs.v, causal=case.causal, return_lse=True
        ),
        50,
    )


def deterministic_gradients(inputs, case):
    result = run_flash3(inputs, causal=case.causal, deterministic=True)
    return result.dq, result.dk, result.dv


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_backward_many_times(case, flash3_rows):
    flash3_rows(torch.bfloat16, case.head_dim, case.causal)
    inputs = case.inputs(torch.bfloat16, "cuda", dlse=True)
    assert_repeats(lambda: deterministic_gradients(inputs, case), 500)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("case", CONTENDED, ids=str)
def test_backward_under_contention(case, dtype, flash3_rows):
    flash3_rows(dtype, case.head_dim, case.causal)
    inputs = case.inputs(dtype, "cuda")
    assert_repeats(lambda: deterministic_gradients(inputs, case), 60)


@pytest.mark.parametrize("num_heads_kv", [8, 2])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_backward_a_thousand_times_beside_other_work(head_dim, num_heads_kv, flash3_rows):
    """A matmul on another stream takes multiprocessors away, so that blocks start in another order."""
    flash3_rows(torch.bfloat16, head_dim, True)
    case = Case(1100, 1100, head_dim, True, num_heads_q=8, num_heads_kv=num_heads_kv)
    inputs = case.inputs(torch.bfloat16, "cuda")
    other, load = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def make():
        with torch.cuda.stream(other):
            load @ load
        return deterministic_gradients(inputs, case)

    assert_repeats(make, 1000)
    torch.cuda.synchronize()
