"""Strange but legal tensors work, with equal gradients; what is not legal raises before a launch."""

import math

import pytest
import torch
from attention_math import run_flash3, run_float64, run_same_dtype
from cases import EMPTY, Case, by_length
from tolerance import assert_as_accurate
from views import VIEWS, inside

import flash3

BF16 = torch.bfloat16
KIND = {"dtype": BF16, "device": "cuda"}


def poison_free_memory() -> None:
    """Fills what torch's allocator will hand out next with 0xFF bytes: NaN as a float, -1 as an int."""
    torch.cuda.empty_cache()
    blocks = [torch.full((256 << 20,), 255, dtype=torch.uint8, device="cuda")]
    blocks += [torch.full((512 << 10,), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    del blocks


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__)
def test_views_have_the_gradients_of_their_copies(view, causal, head_dim, flash3_rows):
    flash3_rows(BF16, head_dim, causal)
    leaves, views = zip(
        *(view(2, s, h, head_dim, **KIND) for s, h in ((150, 4), (203, 2), (203, 2))), strict=True
    )
    _, dout = view(2, 150, 4, head_dim, **KIND)

    def run(tensors, dout):
        out, lse = flash3.flash_attn_func(
            *tensors, causal=causal, deterministic=True, return_lse=True
        )
        return out, lse, *torch.autograd.grad(out, leaves, dout.detach())

    copies = [x.contiguous().clone() for x in views]
    for x, y in zip(run(views, dout), run(copies, dout.contiguous().clone()), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradient_of_a_sum(head_dim, flash3_rows):
    """dout and dlse arrive as one number expanded over their shape."""
    flash3_rows(BF16, head_dim, True)
    inputs = Case(150, 150, head_dim, True).inputs(BF16, "cuda")
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = flash3.flash_attn_func(*leaves, causal=True, deterministic=True, return_lse=True)
    expanded = torch.autograd.grad(out.sum() + lse.sum(), leaves, retain_graph=True)
    dense = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    for x, y in zip(expanded, dense, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("filler", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("head_dim", [40, 64, 104, 128])
@pytest.mark.parametrize(
    "case", by_length([(150, 203), (65, 129), (1, 1), (300, 70)], num_heads_q=4), ids=str
)
def test_memory_around_the_tensors_has_no_effect(case, head_dim, filler, flash3_rows):
    flash3_rows(BF16, head_dim, case.causal)
    inputs = case.with_(head_dim=head_dim).inputs(BF16, "cuda")

    def run(tensors, dout):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = flash3.flash_attn_func(
            *leaves, causal=case.causal, deterministic=True, return_lse=True
        )
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    tensors = inputs.q, inputs.k, inputs.v
    poisoned = run([inside(x, filler) for x in tensors], inside(inputs.dout, filler))
    for x, y in zip(run(tensors, inputs.dout), poisoned, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize(
    "case", by_length([(150, 203), (1, 1), (64, 400), (300, 70)], num_heads_q=4), ids=str
)
def test_results_are_written_in_full(case, head_dim, deterministic, flash3_rows):
    """Outputs and workspace lie in memory full of NaN; counters start at -1."""
    flash3_rows(BF16, head_dim, case.causal)
    case = case.with_(head_dim=head_dim)
    inputs = case.inputs(BF16, "cuda", dlse=True)
    arguments = {"causal": case.causal}
    right, torch_result = run_float64(inputs, **arguments), run_same_dtype(inputs, **arguments)
    poison_free_memory()
    result = run_flash3(inputs, deterministic=deterministic, **arguments)
    assert_as_accurate(result, right, torch_result, inputs)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 64), (1, 200, 1, 128), (3, 1, 2, 64), (1, 70, 2, 64)], ids=str
)
def test_length_1_dimensions_may_have_any_stride(shape, flash3_rows):
    flash3_rows(BF16, shape[3], False)
    tensors = [torch.randn(shape, device="cuda").to(BF16) for _ in range(3)]
    dense = tensors[0].stride()
    strides = [
        stride if size > 1 else odd
        for stride, size, odd in zip(dense, shape, (7, 5, 3, 1), strict=True)
    ]
    strange = [x.as_strided(shape, strides) for x in tensors]
    for x, y in zip(
        flash3.flash_attn_func(*strange, return_lse=True),
        flash3.flash_attn_func(*tensors, return_lse=True),
        strict=True,
    ):
        assert torch.equal(x, y)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "case", [Case(*lengths) for lengths in EMPTY] + [Case(3, 4, batch=0)], ids=str
)
def test_empty_extents(case, causal, flash3_rows):
    poison_free_memory()
    inputs = case.inputs(BF16, "cuda", dlse=True)
    result = run_flash3(inputs, causal=causal)
    assert (result.out == 0).all() and (result.lse == -math.inf).all()
    for grad, x in ((result.dq, inputs.q), (result.dk, inputs.k), (result.dv, inputs.v)):
        assert grad.shape == x.shape and (grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_full_precision_raises(dtype, requires_grad):
    q = torch.zeros(1, 8, 1, 64, dtype=dtype, device="cuda", requires_grad=requires_grad)
    with pytest.raises(TypeError, match="accepted are float16, bfloat16"):
        flash3.flash_attn_func(q, q, q)


def test_fp8_that_requires_grad_raises():
    q = torch.zeros(1, 8, 1, 64, device="cuda").to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
        flash3.flash_attn_func(q, q, q)


def test_mixed_devices_raise():
    q = torch.zeros(1, 8, 1, 64, dtype=BF16, device="cuda")
    with pytest.raises(ValueError, match="one device"):
        flash3.flash_attn_func(q, q.cpu(), q)
