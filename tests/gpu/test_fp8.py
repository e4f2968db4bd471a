"""flash3::fp8_fwd against the float64 formula on the dequantised tensors, and everything around it.

The rule of tolerance.py, with a PyTorch computation that rounds what the kernel rounds, P to e4m3, in torch's place:

    max |out - right|  <=  2 * max |emulated - right| + half a unit of out + score_error * max |v|
    max |lse - right|  <=  score_error + 1e-5 * (1 + |lse|)

Hopper's tensor cores keep about 13 bits below the largest product of a float8 sum, so a score is off by up to
score_error = 2^-12 * scale * max sum |q| |k|.
"""

import pytest
import torch
from attention_math import attention_math
from cases import Case, by_length

import flash3
from flash3 import fp8, ops_fp8, reference_fp8
from flash3.reference_fp8 import BLOCK, E4M3, HEAD

HEAD_DIMS = [16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 208, 256]
LENGTHS = [(1, 1), (5, 1), (17, 63), (64, 64), (127, 129), (193, 192), (320, 449), (777, 1291), (513, 77)]  # fmt: skip


def skip_what_is_not_built(error: Exception) -> None:
    if "this build has no" in str(error) or "Could not run 'flash3::fp8_fwd'" in str(error):
        pytest.skip("not built: float8 row")


def forward(*arguments):
    """flash3::fp8_fwd; skips the test where the build has no row for it."""
    try:
        return ops_fp8.fp8_fwd(*arguments)
    except (RuntimeError, NotImplementedError) as error:
        skip_what_is_not_built(error)
        raise


@pytest.fixture(autouse=True)
def some_row_is_built():
    x = torch.zeros(1, 8, 1, 128, device="cuda").to(E4M3)
    forward(x, x, x, None, None, None, 128, 128, 128, 1.0, 1.0, False, False, None, 0)


def dequantized(x, descale, block):
    return reference_fp8.dequantize(x, descale, block).double()


def emulate(q, k, v, scale, causal):
    """float64, but for P, which is rounded to e4m3 relative to its row's maximum."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q * scale, k)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~seen.tril(k.shape[1] - q.shape[1]), -torch.inf)
    largest = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    probs = torch.exp(scores - largest)
    rounded = (probs * 256).float().to(E4M3).double() / 256
    total = probs.sum(-1, keepdim=True)
    return torch.einsum("bhij,bjhd->bihd", rounded / total.clamp(min=1e-300), v)


def score_error(q, k, scale):
    group = q.shape[2] // k.shape[2]
    sums = torch.einsum("bihd,bjhd->bhij", q.abs(), k.repeat_interleave(group, 2).abs())
    return 2.0**-12 * scale * (sums.max().item() if sums.numel() else 0.0)


def assert_right(results, tensors, scale, causal):
    """`tensors`: q, k, v as they were given to the kernel, dequantised to float64."""
    out, lse = results
    right, right_lse = attention_math(*tensors, scale, causal)
    assert out.shape == right.shape and out.is_contiguous() and lse.dtype is torch.float32
    no_key = right_lse.isneginf()
    assert torch.equal(lse.isneginf(), no_key)
    of_scores = score_error(*tensors[:2], scale)
    lse_error = (lse.double() - right_lse).masked_fill(no_key, 0.0).abs()
    assert (lse_error <= of_scores + 1e-5 * (1 + right_lse.masked_fill(no_key, 0.0).abs())).all()
    emulated = (emulate(*tensors, scale, causal) - right).abs().max().item()
    bound = 2 * emulated + torch.finfo(out.dtype).eps / 2 * right.abs().max().item()
    bound += of_scores * tensors[2].abs().max().item()
    error = (out.double() - right).abs().max().item()
    assert error <= bound, f"out: error {error:.3e} > {bound:.3e}, emulated {emulated:.3e}"


def check(
    case: Case, granularity=BLOCK, block=128, transpose_v=True, hadamard=False, dtype=torch.bfloat16
):
    inputs = case.inputs(dtype, "cuda")
    scale = case.head_dim**-0.5
    q, k, v, *descales = ops_fp8.quantize_qkv(
        inputs.q, inputs.k, inputs.v, None, None, False, granularity, block, hadamard, 0, transpose_v
    )  # fmt: skip
    if granularity != BLOCK:
        block = 128
        descales = [
            fp8._per_block(d, x, case.num_heads_kv)
            for d, x in zip(descales, (q, k, k), strict=True)
        ]
    blocks = (block,) * 3
    results = forward(q, k, v, *descales, *blocks, scale, 1.0, case.causal, transpose_v, dtype, 0)
    if transpose_v:
        v = reference_fp8.natural_values(v, case.seqlen_k)
    tensors = [dequantized(x, d, block) for x, d in zip((q, k, v), descales, strict=True)]
    assert_right(results, tensors, scale, case.causal)
    return results


@pytest.mark.parametrize("transpose_v", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("case", by_length(LENGTHS, num_heads_q=4), ids=str)
def test_lengths(case, head_dim, transpose_v):
    check(case.with_(head_dim=head_dim), transpose_v=transpose_v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("transpose_v", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim, transpose_v, causal):
    check(Case(200, 333, head_dim, causal), transpose_v=transpose_v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (5, 1), (16, 2)])
@pytest.mark.parametrize("granularity", [BLOCK, HEAD, 2])
def test_heads_and_granularities(heads, granularity, causal):
    check(Case(300, 500, 128, causal, *heads), granularity)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_of_64_and_dtypes(head_dim, causal, dtype):
    check(Case(300, 500, head_dim, causal), block=64, hadamard=True, dtype=dtype)


def test_block_scales_of_different_sizes():
    """Scales that differ by a factor of a thousand between blocks, and block sizes that differ between tensors."""
    q, k, v = (torch.randn(2, 500, 2, 128, device="cuda").to(E4M3) for _ in range(3))
    q_scale, k_scale, v_scale = (
        10 ** (3 * torch.rand(2, 2, n, device="cuda") - 2) for n in (8, 4, 8)
    )
    scale = 1 / 128
    results = forward(
        q, k, v, q_scale, k_scale, v_scale, 64, 128, 64, scale, 0.5, True, False, None, 0
    )
    tensors = (
        dequantized(q, q_scale, 64),
        dequantized(k, k_scale, 128),
        dequantized(v, v_scale, 64) * 0.5,
    )
    assert_right(results, tensors, scale, True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 112, 128, 256])
@pytest.mark.parametrize("largest", [1, 3, 30, 3000])
@pytest.mark.parametrize("rise", ["at once", "steadily"])
def test_scores_outgrow_those_of_earlier_keys(rise, largest, head_dim, causal):
    """By little, by more than e4m3 holds relative to them, and by more than exp2 does; in one block, or in most."""
    q, k, v = (torch.randn(2, n, 2, head_dim, device="cuda").to(E4M3) for n in (600, 1100, 1100))
    factors = torch.linspace(1, largest, 9, device="cuda")
    if rise == "at once":
        factors = torch.where(factors > factors.mean(), float(largest), 1.0)
    k_scale = factors.expand(2, 2, 9).contiguous()
    v_scale = torch.linspace(1, 0.01, 18, device="cuda").expand(2, 2, 18).contiguous()
    scale = head_dim**-0.5
    results = forward(
        q, k, v, None, k_scale, v_scale, 128, 128, 64, scale, 1.0, causal, False, None, 0
    )
    tensors = q.double(), dequantized(k, k_scale, 128), dequantized(v, v_scale, 64)
    assert_right(results, tensors, scale, causal)


def test_forms_of_descales():
    q, k, v = (torch.randn(2, 300, h, 128, device="cuda").to(E4M3) for h in (4, 2, 2))
    by_head = [torch.rand(2, 2, device="cuda") + 0.5 for _ in range(3)]
    out, lse = flash3.flash_attn_func(
        q, k, v, q_descale=by_head[0], k_descale=by_head[1], v_descale=by_head[2], return_lse=True
    )
    tensors = [
        x.double() * s.double().repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None]
        for x, s in zip((q, k, v), by_head, strict=True)
    ]
    assert_right((out, lse), tensors, 128**-0.5, False)
    number = flash3.flash_attn_func(q, k, v, q_descale=0.5, k_descale=2.0, v_descale=0.25)
    tensor = flash3.flash_attn_func(
        q, k, v, q_descale=torch.full((1,), 0.5, device="cuda"),
        k_descale=torch.full((1,), 2.0, device="cuda"), v_descale=torch.full((1,), 0.25, device="cuda"),
    )  # fmt: skip
    torch.testing.assert_close(number, tensor, rtol=0.01, atol=0.002)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0), (200, 70)])
def test_rows_without_keys(lengths):
    q, k, v = (torch.randn(2, n, 2, 64, device="cuda").bfloat16() for n in (*lengths, lengths[1]))
    out, lse = flash3.flash_attn_fp8_func(q, k, v, causal=True, return_lse=True)
    blind = max(0, lengths[0] - lengths[1])
    assert (out[:, :blind] == 0).all() and (lse[..., :blind] == -torch.inf).all()
    assert out.isfinite().all() and lse[..., blind:].isfinite().all()


@pytest.mark.parametrize("transpose_v", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_what_lies_around_the_tensors_has_no_effect(causal, transpose_v):
    case = Case(200, 333, 96, causal, 4, 2)
    inputs = case.inputs(torch.bfloat16, "cuda")
    arguments = None, None, False, BLOCK, 128, True, 0, transpose_v
    q, k, v, *descales = ops_fp8.quantize_qkv(inputs.q, inputs.k, inputs.v, *arguments)
    rest = 128, 128, 128, 0.1, 1.0, causal, transpose_v, None, 0
    clean = forward(q, k, v, *descales, *rest)
    poisoned = []
    for x in (q, k) if transpose_v else (q, k, v):
        shape = x.shape[0] + 1, x.shape[1] + 200, x.shape[2] + 1, x.shape[3] + 32
        around = torch.full(shape, 0x7F, dtype=torch.uint8, device="cuda")  # NaN
        view = around[tuple(slice(n) for n in x.shape)]
        view.copy_(x.view(torch.uint8))
        poisoned.append(view.view(E4M3))
    tensors = (*poisoned, v) if transpose_v else poisoned
    for a, b in zip(forward(*tensors, *descales, *rest), clean, strict=True):
        assert torch.equal(a, b)


def test_nan_and_infinity_reach_what_depends_on_them():
    q, k, v = (torch.randn(1, 300, 2, 128, device="cuda").bfloat16() for _ in range(3))
    q[0, 7, 0, 3] = torch.nan
    q[0, 9, 1, 3] = torch.inf
    out, lse = flash3.flash_attn_fp8_func(q, k, v, return_lse=True)
    bad = torch.zeros(300, 2, dtype=torch.bool, device="cuda")
    bad[7, 0] = bad[9, 1] = True
    assert torch.equal(out[0].isnan().all(-1), bad) and torch.equal(out[0].isnan().any(-1), bad)
    assert torch.equal(lse[0].T.isnan(), bad)
    v[0, 11, 0, 5] = torch.nan
    out = flash3.flash_attn_fp8_func(q, k, v)
    assert out[0, :, 0, 5].isnan().all()


def test_bitwise_repeatable():
    q, k, v = (torch.randn(2, 2000, 4, 128, device="cuda").bfloat16() for _ in range(3))
    first = flash3.flash_attn_fp8_func(q, k, v, causal=True, return_lse=True)
    for _ in range(20):
        again = flash3.flash_attn_fp8_func(q, k, v, causal=True, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    "keys, n", [(1, 128), (129, 192), (192, 192), (197, 128), (512, 128), (1024, 128), (2048, 192)]
)
def test_of_two_tiles_the_one_that_suits_the_keys(keys, n):
    """At head_dim 128 without a mask a step has 192 keys, or 128 where those of 192 would be emptier."""
    q, k = (torch.randn(1, s, 1, 128, device="cuda").to(E4M3) for s in (100, keys))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    forward(q, k, k, None, None, None, 128, 128, 128, 0.1, 1.0, False, False, None, 0)
    with torch.profiler.profile(activities=activities) as profile:
        forward(q, k, k, None, None, None, 128, 128, 128, 0.1, 1.0, False, False, None, 0)
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    names = [event.name for event in profile.events() if event.device_type == cuda]
    if not names:
        pytest.skip("the profiler sees no GPU activity here")
    assert len(names) == 1 and "fwd_e4m3_hd128_full" in names[0]
    assert ("_n128" in names[0]) == (n == 128)


def test_transposed_and_natural_values_agree():
    case = Case(500, 700, 128, num_heads_q=4)
    natural, transposed = (check(case, transpose_v=transpose_v) for transpose_v in (False, True))
    torch.testing.assert_close(natural[0], transposed[0], rtol=0.02, atol=0.004)


def test_runs_under_a_cuda_graph_and_in_a_compiled_function():
    q, k, v = (torch.randn(2, 300, 4, 128, device="cuda").bfloat16() for _ in range(3))
    eager = flash3.flash_attn_fp8_func(q, k, v, causal=True)
    compiled = torch.compile(
        lambda q, k, v: flash3.flash_attn_fp8_func(q, k, v, causal=True), fullgraph=True
    )
    assert torch.equal(compiled(q, k, v), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash3.flash_attn_fp8_func(q, k, v, causal=True)
    q.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, flash3.flash_attn_fp8_func(q, k, v, causal=True))
