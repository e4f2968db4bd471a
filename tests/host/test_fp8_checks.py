"""Every bad argument of the float8 functions raises before a kernel is reached, and the message names it."""

import math

import pytest
import torch

import flash3
from flash3 import fp8
from flash3.reference_fp8 import E4M3

SHAPE, KEYS = (2, 70, 4, 64), (2, 150, 2, 64)


def tensors(q_shape=SHAPE, k_shape=KEYS, v_shape=None, dtype=E4M3, device="cpu"):
    shapes = q_shape, k_shape, v_shape or k_shape
    return [torch.zeros(shape, device=device).to(dtype) for shape in shapes]


def half(*shapes, dtype=torch.bfloat16):
    return tensors(*shapes, dtype=dtype)


def assert_raises(error, *parts, function=flash3.flash_attn_func, inputs=None, **arguments):
    with pytest.raises(error) as caught:
        function(*(tensors() if inputs is None else inputs), **arguments)
    assert type(caught.value) is error, f"raised the subclass {type(caught.value)}"
    for part in parts:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("position, name", list(enumerate("qkv")))
def test_mixed_dtypes(position, name):
    inputs = tensors()
    inputs[position] = inputs[position].to(torch.bfloat16)
    assert_raises(
        TypeError, name if position else "q, k, v", "float8_e4m3fn", "bfloat16", inputs=inputs
    )


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_other_float8_dtypes(dtype):
    assert_raises(TypeError, str(dtype), inputs=tensors(dtype=dtype))
    assert_raises(TypeError, str(dtype), inputs=tensors(dtype=dtype), function=fp8.quantize_qkv)
    inputs = tensors()
    inputs[2] = inputs[2].float().to(dtype)
    assert_raises(TypeError, "v:", str(dtype), inputs=inputs)


@pytest.mark.parametrize("head_dim", [8, 24, 72, 100, 264, 272])
def test_head_dim(head_dim):
    shapes = (*SHAPE[:3], head_dim), (*KEYS[:3], head_dim)
    parts = "q: head_dim", "multiple of 16", "256", str(head_dim)
    assert_raises(ValueError, *parts, inputs=tensors(*shapes))
    for function in (fp8.quantize_qkv, flash3.flash_attn_fp8_func):
        assert_raises(ValueError, *parts, "Hadamard", inputs=half(*shapes), function=function)
        assert_raises(ValueError, *parts, inputs=half(*shapes), function=function, hadamard=False)


@pytest.mark.parametrize(
    "shapes, parts",
    [
        (((2, 70, 64), KEYS), ("q:", "(2, 70, 64)")),
        ((SHAPE, (3, 150, 2, 64)), ("k:", "batch 2")),
        ((SHAPE, (2, 150, 2, 32)), ("k:", "head_dim 64")),
        ((SHAPE, (2, 150, 3, 64)), ("query heads", "4 and 3")),
        ((SHAPE, KEYS, (2, 151, 2, 64)), ("v:", "(2, 151, 2, 64)")),
        ((SHAPE, KEYS, (2, 150, 2, 32)), ("v:", "(2, 150, 2, 32)")),
    ],
)
def test_shapes(shapes, parts):
    assert_raises(ValueError, *parts, inputs=tensors(*shapes))
    assert_raises(ValueError, *parts, inputs=half(*shapes), function=fp8.quantize_qkv)
    assert_raises(ValueError, *parts, inputs=half(*shapes), function=flash3.flash_attn_fp8_func)


@pytest.mark.parametrize("position, name", list(enumerate("qkv")))
def test_devices_and_kinds(position, name):
    inputs = tensors()
    inputs[position] = inputs[position].to("meta")
    assert_raises(ValueError, "device", "meta", inputs=inputs)
    inputs[position] = 3.0
    assert_raises(TypeError, f"{name}: must be a torch.Tensor", inputs=inputs)


@pytest.mark.parametrize("position", range(3))
def test_e4m3_has_no_gradient(position):
    inputs = tensors()
    inputs[position].requires_grad_()
    assert_raises(NotImplementedError, "no gradient", "flash_attn_fp8_func", inputs=inputs)
    with torch.no_grad():
        flash3.flash_attn_func(*inputs)
    inputs = half()
    inputs[position].requires_grad_()
    parts = "no gradient", "flash_attn_fp8_func"
    assert_raises(NotImplementedError, *parts, inputs=inputs, function=fp8.quantize_qkv)


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize(
    "value, error, part",
    [
        (torch.ones(2, 4), ValueError, "(2, 4)"),
        (torch.ones(2), ValueError, "(2,)"),
        (torch.ones(()), ValueError, "()"),
        (torch.ones(2, 2, 1), ValueError, "(2, 2, 1)"),
        (torch.ones(2, 2).half(), TypeError, "float16"),
        (torch.ones(2, 2, dtype=torch.float64), TypeError, "float64"),
        (torch.ones(2, 2, device="meta"), ValueError, "meta"),
        (torch.ones(2, 2, requires_grad=True), NotImplementedError, "no gradient"),
        ("1.0", TypeError, "str"),
        (True, TypeError, "bool"),
        (0.0, ValueError, "positive"),
        (-1.0, ValueError, "positive"),
        (math.nan, ValueError, "nan"),
        (math.inf, ValueError, "inf"),
        (1e-40, ValueError, "1e-40"),
    ],
)
def test_descales(name, value, error, part):
    assert_raises(error, f"{name}_descale", part, **{f"{name}_descale": value})


@pytest.mark.parametrize("name, shape", [("q", (2, 4, 1)), ("k", (2, 2, 2)), ("v", (2, 2, 3))])
def test_block_descales(name, shape):
    argument = f"{name}_block_descale"
    flash3.flash_attn_func(*tensors(), **{argument: torch.ones(shape)})
    for bad in [(*shape[:2], 4), (shape[0], shape[1] + 1, shape[2]), shape[:2], (3, *shape[1:])]:
        parts = argument, str(shape[:1])[:-1], "128", "64", str(bad)
        assert_raises(ValueError, *parts, **{argument: torch.ones(bad)})
    assert_raises(TypeError, argument, "float64", **{argument: torch.ones(shape).double()})
    assert_raises(TypeError, argument, "float", **{argument: 1.0})
    assert_raises(ValueError, argument, "meta", **{argument: torch.ones(shape, device="meta")})
    both = {argument: torch.ones(shape), f"{name}_descale": 1.0}
    assert_raises(ValueError, argument, f"{name}_descale", "at most one", **both)


def test_scales_that_leave_float32_together():
    assert_raises(ValueError, "softmax_scale", "q_descale", q_descale=1e30, k_descale=1e30)
    assert_raises(ValueError, "softmax_scale", "k_descale", q_descale=1e-30, k_descale=1e-30)


@pytest.mark.parametrize("name", ["q_block_descale", "k_block_descale", "v_block_descale"])
def test_float8_arguments_beside_16_bit_tensors(name):
    assert_raises(TypeError, name, "float8_e4m3fn", inputs=half(), **{name: torch.ones(2, 4, 1)})
    assert_raises(TypeError, "out_dtype", inputs=half(), out_dtype=torch.bfloat16)
    descale = name.replace("_block", "")
    assert_raises(NotImplementedError, descale, "float8_e4m3fn", inputs=half(), **{descale: 1.0})


@pytest.mark.parametrize("out_dtype", [torch.float32, E4M3, "bf16"])
def test_out_dtype(out_dtype):
    assert_raises(TypeError, "out_dtype", str(out_dtype), out_dtype=out_dtype)
    quantized = [fp8.quantize_qkv(*half())]
    assert_raises(
        TypeError, "out_dtype", inputs=quantized, function=fp8.attention, out_dtype=out_dtype
    )


@pytest.mark.parametrize(
    "name, value",
    [("window_size", (128, 0)), ("softcap", 30.0), ("attention_chunk", 64), ("num_splits", 2)],
)
def test_what_float8_lacks(name, value):
    assert_raises(NotImplementedError, name, **{name: value})


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("block", 32, ValueError),
        ("block", 256, ValueError),
        ("block", 128.0, TypeError),
        ("seed", 2**63, ValueError),
        ("seed", 0.5, TypeError),
        ("seed", True, TypeError),
        ("hadamard", 1, TypeError),
    ],
)
@pytest.mark.parametrize("function", [fp8.quantize_qkv, flash3.flash_attn_fp8_func])
def test_quantiser_arguments(name, value, error, function):
    assert_raises(error, f"{name}:", str(value), inputs=half(), function=function, **{name: value})


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("granularity", "row", ValueError),
        ("granularity", 128, ValueError),
        ("interleaved", None, TypeError),
        ("transpose_v", 1, TypeError),
    ],
)
def test_quantize_qkv_arguments(name, value, error):
    arguments = {"function": fp8.quantize_qkv, name: value}
    assert_raises(error, f"{name}:", inputs=half(), **arguments)


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("promote_every", -1, ValueError),
        ("promote_every", 2, ValueError),
        ("promote_every", 1.5, TypeError),
        ("softmax_scale", 0.0, ValueError),
        ("softmax_scale", "1", TypeError),
        ("causal", 1, TypeError),
    ],
)
def test_attention_arguments(name, value, error):
    quantized = [fp8.quantize_qkv(*half())]
    assert_raises(error, name, inputs=quantized, function=fp8.attention, **{name: value})
    assert_raises(error, name, inputs=half(), function=flash3.flash_attn_fp8_func, **{name: value})


def test_two_level_sums_are_for_head_dims_up_to_128():
    parts = "promote_every:", "128", "144"
    inputs = half((*SHAPE[:3], 144), (*KEYS[:3], 144))
    function = flash3.flash_attn_fp8_func
    assert_raises(
        NotImplementedError,
        *parts,
        inputs=inputs,
        function=function,
        hadamard=False,
        promote_every=1,
    )


def test_other_arguments_of_flash_attn_fp8_func():
    function = flash3.flash_attn_fp8_func
    assert_raises(TypeError, "recompute", inputs=half(), function=function, recompute=None)
    assert_raises(TypeError, "deterministic", inputs=half(), function=function, deterministic=1)
    assert_raises(TypeError, "float32", inputs=half(dtype=torch.float32), function=function)
    for quantiser in (fp8.quantize_qkv, function):
        assert_raises(NotImplementedError, "flash_attn_func", inputs=tensors(), function=quantiser)
    assert_raises(TypeError, "quantized", inputs=half()[:1], function=fp8.attention)


TABLES = torch.ones(150, 16)


@pytest.mark.parametrize(
    "cos, sin, error, parts",
    [
        (TABLES, None, TypeError, ("sin:", "NoneType")),
        (None, TABLES, TypeError, ("cos:", "NoneType")),
        (TABLES.half(), TABLES.half(), TypeError, ("cos:", "float32", "bfloat16")),
        (TABLES, TABLES.bfloat16(), ValueError, ("sin:", "dtype")),
        (TABLES[:149], TABLES[:149], ValueError, ("cos:", "150 positions", "(149, 16)")),
        (TABLES[0], TABLES[0], ValueError, ("cos:", "(16,)")),
        (TABLES, TABLES[:, :8], ValueError, ("sin:", "(150, 16)")),
        (TABLES[:, :12], TABLES[:, :12], ValueError, ("cos:", "multiple of 8", "12")),
        (TABLES.repeat(1, 3), TABLES.repeat(1, 3), ValueError, ("cos:", "32", "48")),
        (TABLES.to("meta"), TABLES.to("meta"), ValueError, ("cos:", "meta")),
    ],
)
def test_rotary_tables(cos, sin, error, parts):
    assert_raises(error, *parts, inputs=half(), function=fp8.quantize_qkv, cos=cos, sin=sin)


def test_rotary_wants_no_more_queries_than_keys():
    inputs, tables = half(KEYS, SHAPE[:2] + KEYS[2:]), {"cos": TABLES, "sin": TABLES}
    assert_raises(ValueError, "q:", "70", function=fp8.quantize_qkv, inputs=inputs, **tables)
