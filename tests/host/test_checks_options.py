"""Every bad window, chunk, cap or sink raises before a kernel is reached, by all three functions, and is named."""

import math

import pytest
import torch

import flash3
from flash3 import checks_options


def dense(q, k, v, **arguments):
    return flash3.flash_attn_func(q, k, v, **arguments)


def qkvpacked(q, k, v, **arguments):
    return flash3.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), **arguments)


def varlen(q, k, v, **arguments):
    ends = torch.tensor((0, 9, 18), dtype=torch.int32)
    return flash3.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), ends, ends, 9, 9, **arguments
    )


FUNCTIONS = pytest.mark.parametrize(
    "function", [dense, qkvpacked, varlen], ids=lambda f: f.__name__
)


def tensors(dtype=torch.bfloat16):
    return [torch.randn(2, 9, 4, 16).to(dtype) for _ in "qkv"]


def assert_raises(function, error, *message_parts, **arguments):
    with pytest.raises(error) as caught:
        function(*tensors(), **arguments)
    assert type(caught.value) is error, f"raised the subclass {type(caught.value)}"
    for part in message_parts:
        assert part in str(caught.value)


@FUNCTIONS
@pytest.mark.parametrize(
    "window",
    [None, -1, 4, (1,), (-1, -1, -1), (-1.0, 0.0), "ab", (True, False), (3, None), {1: 2, 3: 4}],
)
def test_window_that_is_no_pair(function, window):
    assert_raises(
        function, TypeError, "window_size:", "pair (left, right)", repr(window), window_size=window
    )


@FUNCTIONS
@pytest.mark.parametrize("window", [(-2, 0), (3, -5), [-7, -7]])
def test_window_out_of_range(function, window):
    assert_raises(
        function, ValueError, "window_size:", "at least 0", str(tuple(window)), window_size=window
    )


@FUNCTIONS
@pytest.mark.parametrize("chunk", [None, 2.0, "4", True, torch.tensor(4)])
def test_chunk_of_wrong_type(function, chunk):
    assert_raises(
        function, TypeError, "attention_chunk: must be an int", repr(chunk), attention_chunk=chunk
    )


@FUNCTIONS
def test_negative_chunk(function):
    assert_raises(
        function, ValueError, "attention_chunk: must be positive", "-3", attention_chunk=-3
    )


@FUNCTIONS
@pytest.mark.parametrize("softcap", [None, "1", True, torch.tensor(4.0), 1j])
def test_softcap_of_wrong_type(function, softcap):
    assert_raises(function, TypeError, "softcap: must be a float", repr(softcap), softcap=softcap)


@FUNCTIONS
@pytest.mark.parametrize("softcap", [math.nan, math.inf, -math.inf, -1.0, 1e39, 1e-46])
def test_softcap_out_of_range(function, softcap):
    assert_raises(function, ValueError, "softcap: must be positive", str(softcap), softcap=softcap)


@FUNCTIONS
@pytest.mark.parametrize(("scale", "softcap"), [(1e30, 1e-30), (1e-30, 1e30)])
def test_softcap_that_does_not_fit_the_scale(function, scale, softcap):
    assert_raises(
        function,
        ValueError,
        "softcap: softmax_scale / softcap",
        f"{scale} / {softcap}",
        softmax_scale=scale,
        softcap=softcap,
    )


@FUNCTIONS
@pytest.mark.parametrize(
    ("sink", "error", "message"),
    [
        (0.5, TypeError, "must be None or a torch.Tensor, got float"),
        ([0.5] * 4, TypeError, "must be None or a torch.Tensor, got list"),
        (torch.zeros(4).to_sparse(), TypeError, "must be a dense tensor"),
        (torch.zeros(4).half(), TypeError, "dtype must be q's torch.bfloat16 or torch.float32"),
        (torch.zeros(4).double(), TypeError, "got torch.float64"),
        (torch.zeros(4).int(), TypeError, "got torch.int32"),
        (torch.zeros(4, device="meta"), ValueError, "must be on q's device cpu, got meta"),
        (torch.zeros(2), ValueError, "must have shape (4,), a logit for each head of q, got (2,)"),
        (torch.zeros(4, 1), ValueError, "must have shape (4,)"),
        (torch.zeros(()), ValueError, "must have shape (4,)"),
    ],
    ids=lambda value: "" if isinstance(value, torch.Tensor) else None,
)
def test_sink_that_does_not_fit(function, sink, error, message):
    assert_raises(function, error, "learnable_sink: ", message, learnable_sink=sink)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, (False, ())),
        ({"causal": True}, (True, ())),
        ({"window_size": (-1, 0)}, (True, ())),
        ({"window_size": [2**40, 2**31 - 1]}, (False, ())),
        ({"causal": True, "window_size": (-1, 5)}, (True, ())),
        ({"causal": True, "window_size": (7, 7)}, (True, (None, 7, -1, 0, 0.0))),
        ({"window_size": (7, 0)}, (True, (None, 7, -1, 0, 0.0))),
        ({"window_size": (-1, 3)}, (False, (None, -1, 3, 0, 0.0))),
        ({"softcap": 30}, (False, (None, -1, -1, 0, 30.0))),
        ({"attention_chunk": 64}, (False, (None, -1, -1, 64, 0.0))),
        ({"attention_chunk": 2**50}, (False, (None, -1, -1, 2**31 - 1, 0.0))),
    ],
    ids=str,
)
def test_what_the_operators_are_given(arguments, expected):
    """A call that means no more than a plain one becomes one."""
    defaults = {"causal": False, "window_size": (-1, -1), "attention_chunk": 0, "softcap": 0.0}
    assert (
        checks_options.check_extras(tensors()[0], 0.5, **{**defaults, **arguments}, sink=None)
        == expected
    )


@FUNCTIONS
@pytest.mark.parametrize("causal", [False, True])
def test_neutral_values_change_nothing(function, causal):
    q, k, v = tensors()
    plain = function(q, k, v, causal=causal)
    for arguments in (
        {"window_size": (-1, -1), "softcap": 0, "attention_chunk": 0},
        {"window_size": (100, 100)},
        {"attention_chunk": 100},
        {"learnable_sink": torch.full((4,), -math.inf)},
    ):
        assert torch.equal(function(q, k, v, causal=causal, **arguments), plain), arguments


@pytest.mark.parametrize("make", [lambda: torch.randn(8)[::2], lambda: torch.randn(1).expand(4)])
def test_sink_of_any_stride(make):
    sink = make()
    q, k, v = tensors(torch.float32)
    out = flash3.flash_attn_func(q, k, v, learnable_sink=sink)
    assert torch.equal(out, flash3.flash_attn_func(q, k, v, learnable_sink=sink.clone()))


def test_sink_may_be_float32_or_of_qs_dtype():
    q, k, v = tensors()
    for sink in (torch.randn(4), torch.randn(4).bfloat16()):
        out = flash3.flash_attn_func(q, k, v, learnable_sink=sink.requires_grad_())
        (dsink,) = torch.autograd.grad(out.float().sum(), sink)
        assert dsink.dtype == sink.dtype and dsink.shape == (4,)
