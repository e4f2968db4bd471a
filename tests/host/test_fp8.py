"""Float8 on the CPU: the quantiser's specification, attention of its results, gradients, and every bad argument."""

import pytest
import torch
from cases import Case

import flash3
from flash3 import fp8, reference, reference_fp8
from flash3.reference_fp8 import BLOCK, E4M3, E4M3_MAX, HEAD, TENSOR


def qkv(seqlen_q=70, seqlen_k=150, head_dim=64, dtype=torch.bfloat16, **fields):
    case = Case(seqlen_q, seqlen_k, head_dim, num_heads_q=4, num_heads_kv=2, **fields)
    inputs = case.inputs(dtype)
    return inputs.q, inputs.k, inputs.v


def relative(x, right):
    return ((x.double() - right).norm() / right.norm()).item()


def exact(q, k, v, causal, scale=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return reference.attention_forward(q.double(), k.double(), v.double(), scale, causal)


def bytes_of(x):
    return x.view(torch.uint8)


# --- the quantiser -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 96, 128, 192, 256])
def test_hadamard_keeps_lengths_and_products(head_dim):
    x, y = torch.randn(2, 5, head_dim, dtype=torch.float64)
    block = reference_fp8.hadamard_block(head_dim)
    matrix = reference_fp8.hadamard(torch.eye(head_dim, dtype=torch.float64), block)
    assert torch.equal(matrix @ matrix.T, block * torch.eye(head_dim, dtype=torch.float64))
    assert set(matrix.unique().tolist()) <= {-1.0, 0.0, 1.0}
    signs = reference_fp8.hadamard_signs(3, head_dim).double()
    rotated = [reference_fp8.hadamard(z * signs, block) * block**-0.5 for z in (x, y)]
    torch.testing.assert_close(rotated[0] @ rotated[1].T, x @ y.T)


@pytest.mark.parametrize("head_dim, block", [(64, 64), (96, 32), (192, 64), (80, 16), (256, 256)])
def test_hadamard_block_is_the_largest_power_of_two(head_dim, block):
    assert reference_fp8.hadamard_block(head_dim) == block


def test_signs_follow_from_the_seed():
    first = reference_fp8.hadamard_signs(0, 256)
    # The first number of splitmix64 with seed 0 is 0xe220a8397b1dcdaf.
    assert [int(s < 0) for s in first[:8].tolist()] == [1, 1, 1, 1, 0, 1, 0, 1]
    assert torch.equal(first[:64], reference_fp8.hadamard_signs(0, 64))
    others = [reference_fp8.hadamard_signs(seed, 256) for seed in (1, -1, 2**62)]
    assert all(90 < (first != other).sum() < 166 for other in others)
    assert abs(first.sum()) < 60


@pytest.mark.parametrize("seqlen", [1, 64, 100, 130, 256])
@pytest.mark.parametrize("block", [64, 128])
def test_block_scales_fill_the_range_and_round_once(seqlen, block):
    x = torch.randn(2, seqlen, 3, 32).bfloat16() * torch.tensor([1e-3, 1.0, 300.0]).view(3, 1)
    stored, descale = reference_fp8.quantize(x, 3, BLOCK, block)
    assert stored.shape == x.shape and stored.dtype is E4M3
    assert descale.shape == (2, 3, -(-seqlen // block)) and descale.is_contiguous()
    for start in range(0, seqlen, block):
        rows = x[:, start : start + block].float()
        amax = rows.abs().amax((1, 3))
        assert torch.equal(descale[..., start // block], amax / E4M3_MAX)
        assert (stored[:, start : start + block].float().abs().amax((1, 3)) == E4M3_MAX).all()
    back = reference_fp8.dequantize(stored, descale, block)
    # Half a unit of a 3-bit mantissa, or of the smallest e4m3.
    bound = x.float().abs() / 16 + 2**-10 * descale.amax((0, 2)).view(3, 1)
    assert ((back - x.float()).abs() <= bound * 1.001).all()


def test_scales_of_a_head_are_shared_by_its_group_and_the_tensors_by_all():
    x = torch.randn(2, 9, 4, 16).bfloat16()
    _, descale = reference_fp8.quantize(x, 2, HEAD, 128)
    expected = x.float().unflatten(2, (2, 2)).abs().amax((1, 3, 4)) / E4M3_MAX
    assert torch.equal(descale, expected)
    _, descale = reference_fp8.quantize(x, 2, TENSOR, 128)
    assert torch.equal(descale, (x.float().abs().max() / E4M3_MAX).reshape(1))


@pytest.mark.parametrize("granularity", [BLOCK, HEAD, TENSOR])
@pytest.mark.parametrize("seed", [None, 5])
def test_zeros_have_scale_one(granularity, seed):
    stored, descale = reference_fp8.quantize(
        torch.zeros(1, 65, 2, 32).bfloat16(), 2, granularity, 64, seed=seed
    )
    assert (descale == 1).all() and (stored.float() == 0).all()


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("magnitude", [1e-40, 1e-37, 1e-30, 1e30])
def test_extreme_magnitudes_stay_finite(magnitude, seed):
    x = (torch.randn(1, 64, 1, 64) * magnitude).bfloat16()
    stored, descale = reference_fp8.quantize(x, 1, BLOCK, 64, seed=seed)
    assert stored.float().isfinite().all() and descale.isfinite().all()
    assert (descale >= torch.finfo(torch.float32).tiny).all()
    if magnitude > 1e-35:
        y, factor = reference_fp8.rotate(x, None, False, seed)
        assert relative(reference_fp8.dequantize(stored, descale, 64), y.double() * factor) < 0.04


def test_denormals_of_e4m3_are_exact():
    # 448 fixes the scale to 1; multiples of 2^-9 up to 7 of them are e4m3's denormals.
    x = torch.zeros(1, 64, 1, 16)
    x[0, 0, 0, 0] = 448.0
    x[0, 1:8, 0, 0] = torch.arange(1, 8) * 2.0**-9
    stored, descale = reference_fp8.quantize(x.bfloat16(), 1, BLOCK, 64)
    assert descale.item() == 1.0 and torch.equal(stored.float(), x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_become_nan_and_do_not_touch_the_scale(bad):
    x = torch.randn(1, 70, 2, 32).bfloat16()
    _, clean = reference_fp8.quantize(x, 2, BLOCK, 64)
    row = x[0, 3, 0].clone()
    keep = row.abs().argmin()
    x[0, 3, 0, keep] = bad
    stored, descale = reference_fp8.quantize(x, 2, BLOCK, 64)
    assert torch.equal(descale, clean)
    is_nan = stored.float().isnan()
    assert is_nan.sum() == 1 and is_nan[0, 3, 0, keep]
    stored, descale = reference_fp8.quantize(x, 2, BLOCK, 64, seed=1)
    assert stored.float().isnan()[0, 3, 0].all() and stored.float().isnan().sum() == 32
    assert descale.isfinite().all()


@pytest.mark.parametrize("seqlen", [1, 16, 100, 128, 300])
@pytest.mark.parametrize("head_dim", [16, 48, 128])
def test_transposed_values_are_a_permutation(seqlen, head_dim):
    v = torch.randn(2, seqlen, 3, head_dim).to(E4M3)
    transposed = reference_fp8.transpose_values(v)
    assert transposed.shape == (2, 3, head_dim, -(-seqlen // 128) * 128)
    back = reference_fp8.natural_values(transposed, seqlen)
    assert torch.equal(bytes_of(back), bytes_of(v))


def test_transposed_order_is_the_one_that_the_kernel_reads():
    key, dim = torch.arange(16).view(16, 1), torch.arange(16)
    v = (8.0 * (key // 8) + key % 8 + 16 * (dim % 8 + 8 * (dim // 8))).to(E4M3)
    number = (key + 16 * dim).expand(16, 16)
    stored = reference_fp8.transpose_values(number.to(torch.uint8).view(E4M3)[None, :, None])
    assert v.shape == (16, 16)
    for r1 in range(2):
        for r0 in range(2):
            for c in range(4):
                for d in range(16):
                    row = d // 2 + 8 * (d % 2)
                    place, holds = 4 * c + 2 * r1 + r0, (8 * r1 + 2 * c + r0) + 16 * d
                    assert bytes_of(stored)[0, 0, row, place] == holds % 256
    assert (bytes_of(stored)[..., 16:] == 0).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [16, 64])
def test_rotary_is_a_complex_product(width, interleaved):
    x = torch.randn(2, 9, 3, 64)
    angle = torch.rand(9, width // 2) * 6
    y = reference_fp8.rotary(x, angle.cos(), angle.sin(), interleaved)
    assert torch.equal(y[..., width:], x[..., width:])
    pairs = (0, 1) if interleaved else (0, width // 2)
    step = 2 if interleaved else 1
    for i in range(width // 2):
        a, b = (offset + step * i for offset in pairs)
        z = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones(9), angle[:, i]).view(9, 1)
        torch.testing.assert_close(torch.complex(y[..., a], y[..., b]), z)


def test_rotary_positions_end_together():
    _, k, v = qkv(5, 12)
    angle = torch.rand(12, 32)
    tables = angle.cos(), angle.sin()
    whole = fp8.quantize_qkv(k.repeat(1, 1, 2, 1), k, v, cos=tables[0], sin=tables[1])
    tail = fp8.quantize_qkv(k[:, 7:].repeat(1, 1, 2, 1), k, v, cos=tables[0], sin=tables[1])
    back = [reference_fp8.dequantize(x.q, x.q_descale, 128) for x in (whole, tail)]
    torch.testing.assert_close(back[0][:, 7:], back[1], rtol=0.15, atol=0.05)
    assert relative(back[0][:, 7:], back[1].double()) < 0.06


# --- attention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["block", "head", "tensor"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_quantised_tensors(granularity, causal):
    q, k, v = qkv()
    right, right_lse = exact(q, k, v, causal)
    results = []
    for transpose_v in (True, False):
        x = fp8.quantize_qkv(q, k, v, granularity=granularity, block=64, transpose_v=transpose_v)
        out, lse = fp8.attention(x, causal=causal, return_lse=True)
        assert out.dtype is torch.bfloat16 and lse.dtype is torch.float32
        assert relative(out, right) < 0.06 and (lse - right_lse).abs().max() < 0.2
        results.append((out, lse))
    suffix = "block_descale" if granularity == "block" else "descale"
    scales = {f"{name}_{suffix}": getattr(x, f"{name}_descale") for name in "qkv"}
    results.append(flash3.flash_attn_func(x.q, x.k, x.v, causal=causal, return_lse=True, **scales))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_descales_of_every_form_mean_the_same():
    q, k, v = (x.to(E4M3) for x in qkv())
    numbers = {"q_descale": 0.5, "k_descale": 2.0, "v_descale": 0.25}
    right, right_lse = exact(q.double() * 0.5, k.double() * 2.0, v.double() * 0.25, False)
    forms = {
        "number": numbers,
        "one": {name: torch.tensor([x]) for name, x in numbers.items()},
        "heads": {name: torch.full((2, 2), x) for name, x in numbers.items()},
        "blocks": {
            f"{name[0]}_block_descale": torch.full((2, heads, blocks), x)
            for (name, x), heads, blocks in zip(numbers.items(), (4, 2, 2), (1, 2, 3), strict=True)
        },
        "strides 0": {
            f"{name[0]}_block_descale": torch.tensor(x).expand(2, heads, 2)
            for (name, x), heads in zip(numbers.items(), (4, 2, 2), strict=True)
        },
    }
    for form in forms.values():
        out, lse = flash3.flash_attn_func(q, k, v, return_lse=True, **form)
        assert relative(out, right) < 0.004
        torch.testing.assert_close(lse, right_lse.float(), rtol=1e-5, atol=1e-5)


def test_scales_differ_by_head_and_block():
    q, k, v = (x.to(E4M3) for x in qkv())
    k_scale, v_scale = torch.rand(2, 2, 3) + 0.5, torch.rand(2, 2, 2) + 0.5
    q_scale = torch.rand(2, 2) + 0.5
    out = flash3.flash_attn_func(
        q, k, v, q_descale=q_scale, k_block_descale=k_scale, v_block_descale=v_scale, causal=True
    )
    per_row = [x.transpose(1, 2) for x in (k_scale, v_scale)]
    k_rows, v_rows = (
        x.repeat_interleave(n, 1)[:, :150, :, None] for x, n in zip(per_row, (64, 128), strict=True)
    )
    q_rows = q_scale.repeat_interleave(2, 1)[:, None, :, None]
    right, _ = exact(q.double() * q_rows, k.double() * k_rows, v.double() * v_rows, True)
    assert relative(out, right) < 0.004


def test_out_dtype():
    tensors = [x.to(E4M3) for x in qkv()]
    assert flash3.flash_attn_func(*tensors).dtype is torch.bfloat16
    assert flash3.flash_attn_func(*tensors, out_dtype=torch.float16).dtype is torch.float16
    x = fp8.quantize_qkv(*qkv())
    assert fp8.attention(x, out_dtype=torch.float16).dtype is torch.float16
    for dtype in (torch.float16, torch.bfloat16):
        assert flash3.flash_attn_fp8_func(*qkv(dtype=dtype)).dtype is dtype


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty(shape):
    q, k, v = qkv(*shape)
    out, lse = flash3.flash_attn_fp8_func(q, k, v, return_lse=True)
    assert out.shape == q.shape and (out == 0).all() and (lse == -torch.inf).all()


def test_packed_heads():
    q, k, v = (x.to(E4M3) for x in qkv(20, 20))
    packed = torch.cat([bytes_of(x) for x in (q, k, v)], 2).view(E4M3)
    out = flash3.flash_attn_qkvpacked_func(packed, num_heads_q=4, q_descale=0.5)
    assert torch.equal(out, flash3.flash_attn_func(q, k, v, q_descale=0.5))


def with_outliers(seqlen, head_dim):
    x = torch.randn(1, seqlen, 2, head_dim)
    return (x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.001)).bfloat16()


def test_hadamard_transform_halves_the_error_of_outliers():
    """The paper's experiment, small: entries N(0, 1) + N(0, 100) * Bernoulli(0.001)."""
    q, k, v = with_outliers(256, 128), with_outliers(2048, 128), with_outliers(2048, 128)
    right, _ = exact(q, k, v, False)
    errors = {}
    for granularity in ("tensor", "block"):
        for hadamard in (False, True):
            x = fp8.quantize_qkv(q, k, v, granularity=granularity, hadamard=hadamard)
            difference = fp8.attention(x).double() - right
            errors[granularity, hadamard] = difference.square().mean().sqrt().item()
    assert errors["block", True] < 1.05e-2
    assert errors["block", True] < 0.7 * errors["tensor", False]
    assert errors["tensor", True] < 0.7 * errors["tensor", False]
