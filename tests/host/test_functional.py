"""flash_attn_func: what it returns, what it accepts, and gradients through strange tensors."""

import inspect
import math
import re

import pytest
import torch
from attention_math import attention_math
from cases import Case
from views import VIEWS, inside

import flash3
from flash3 import ops


def small(dtype=torch.float64, **fields):
    inputs = Case(9, 13, 16, **fields).inputs(dtype)
    return inputs.q, inputs.k, inputs.v


def test_parameters_are_those_of_flash_attention_3():
    parameters = inspect.signature(flash3.flash_attn_func).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert " ".join(positional) == (
        "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits "
        "pack_gqa deterministic sm_margin return_attn_probs"
    )
    defaults = {name: p.default for name, p in parameters.items() if name not in "qkv"}
    assert defaults == {
        "softmax_scale": None,
        "causal": False,
        **dict.fromkeys(("qv", "q_descale", "k_descale", "v_descale", "pack_gqa")),
        "window_size": (-1, -1),
        "attention_chunk": 0,
        "softcap": 0.0,
        "num_splits": 1,
        "deterministic": False,
        "sm_margin": 0,
        "return_attn_probs": False,
        **dict.fromkeys(("learnable_sink", "seqused_q", "seqused_k")),
        "batch_invariant": False,
        "return_lse": False,
        **dict.fromkeys(("q_block_descale", "k_block_descale", "v_block_descale", "out_dtype")),
    }


def test_public_names():
    assert flash3.__version__ == "0.1.0"
    assert all(hasattr(flash3, name) for name in flash3.__all__)


@pytest.mark.parametrize("name", ["return_lse", "return_attn_probs"])
def test_lse_on_request(name):
    q, k, v = small(torch.bfloat16)
    out = flash3.flash_attn_func(q, k, v)
    again, lse = flash3.flash_attn_func(q, k, v, **{name: True})
    assert torch.equal(out, again)
    assert out.dtype == torch.bfloat16 and out.shape == q.shape and out.is_contiguous()
    assert lse.dtype == torch.float32 and lse.shape == (2, 2, 9) and lse.is_contiguous()


@pytest.mark.parametrize("scale", [None, 0.07, 2, 1.5])
def test_scale(scale):
    q, k, v = small()
    torch.testing.assert_close(
        flash3.flash_attn_func(q, k, v, scale), attention_math(q, k, v, scale)[0]
    )


@pytest.mark.parametrize(
    "arguments", [{"causal": True}, {"window_size": (-1, 0)}, {"window_size": [-1, 0]}]
)
def test_spellings_of_causal(arguments):
    q, k, v = small()
    torch.testing.assert_close(
        flash3.flash_attn_func(q, k, v, **arguments), attention_math(q, k, v, causal=True)[0]
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_splits": 0},
        {"pack_gqa": False},
        {"window_size": [-1, -1]},
        {"softcap": 0, "sm_margin": 0},
    ],
)
def test_hints_and_defaults_change_nothing(arguments):
    q, k, v = small()
    assert torch.equal(
        flash3.flash_attn_func(q, k, v, **arguments), flash3.flash_attn_func(q, k, v)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__)
def test_strange_tensors_have_the_gradients_of_their_copies(view, causal):
    kind = {"dtype": torch.float64, "device": "cpu"}
    leaves, views = zip(
        *(view(2, s, h, 16, **kind) for s, h in ((9, 4), (13, 2), (13, 2))), strict=True
    )
    _, dout = view(2, 9, 4, 16, **kind)

    def gradients(tensors):
        out, lse = flash3.flash_attn_func(*tensors, causal=causal, return_lse=True)
        return out, torch.autograd.grad(
            (out, lse.sum()), leaves, (dout.detach(), torch.ones((), dtype=lse.dtype))
        )

    out, grads = gradients(views)
    copy_out, copy_grads = gradients([x.contiguous().clone() for x in views])
    torch.testing.assert_close(out, copy_out)
    for grad, copy_grad in zip(grads, copy_grads, strict=True):
        torch.testing.assert_close(grad, copy_grad)


@pytest.mark.parametrize("filler", [math.nan, math.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_memory_around_the_tensors_has_no_effect(filler, causal):
    inputs = Case(11, 14, 16, causal).inputs(torch.bfloat16)

    def results(tensors, dout):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, lse = flash3.flash_attn_func(*leaves, causal=causal, return_lse=True)
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    clean = results((inputs.q, inputs.k, inputs.v), inputs.dout)
    poisoned = results(
        [inside(x, filler) for x in (inputs.q, inputs.k, inputs.v)], inside(inputs.dout, filler)
    )
    for x, y in zip(clean, poisoned, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (1, 5, 1, 8), (3, 1, 2, 8)])
def test_length_1_dimensions_may_have_any_stride(shape):
    tensors = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    strides = [1 if dim == 3 else (shape[3] if size > 1 else 3) for dim, size in enumerate(shape)]
    strides[1] = shape[2] * shape[3] if shape[1] > 1 else 5
    strides[0] = shape[1] * shape[2] * shape[3] if shape[0] > 1 else 7
    strange = [x.clone().as_strided(shape, strides) for x in tensors]
    torch.testing.assert_close(flash3.flash_attn_func(*strange), flash3.flash_attn_func(*tensors))


def test_meta_tensors_give_shapes():
    q, k, v = (x.to("meta") for x in small(torch.bfloat16))
    out, lse = flash3.flash_attn_func(q, k, v, return_lse=True)
    assert out.device.type == "meta" and out.shape == q.shape and lse.shape == (2, 2, 9)


def test_missing_kernels_are_explained():
    """The message of CUDA calls where the kernels are not built."""
    if ops.kernels_missing is None:
        pytest.skip("the kernels are built")
    with pytest.raises(RuntimeError, match=r"flash3: .*(not built|could not be loaded)"):
        ops._raise_kernels_missing()


def test_reason_for_missing_kernels(monkeypatch):
    import builtins

    def import_that_fails(error):
        def fake_import(name, *args):
            if name == "flash3._C":
                raise error
            return real_import(name, *args)

        real_import = builtins.__import__
        monkeypatch.setattr(builtins, "__import__", fake_import)
        reason = ops._load_kernels()
        monkeypatch.undo()
        return reason

    assert "pip install" in import_that_fails(ModuleNotFoundError("none", name="flash3._C"))
    assert "undefined symbol" in import_that_fails(ImportError("undefined symbol: x"))
    assert "libcudart" in import_that_fails(ModuleNotFoundError("libcudart", name="libcudart"))


# flash_attn_qkvpacked_func


def test_packed_parameters_are_those_of_flash_attention_3():
    parameters = inspect.signature(flash3.flash_attn_qkvpacked_func).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert " ".join(positional) == (
        "qkv softmax_scale causal q_descale k_descale v_descale window_size attention_chunk softcap deterministic "
        "num_heads_q sm_margin return_attn_probs"
    )


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_qkv_in_one_tensor(heads, causal):
    heads_q, heads_kv = heads
    qkv = torch.randn(2, 9, heads_q + 2 * heads_kv, 16, dtype=torch.float64, requires_grad=True)
    q, k, v = qkv.split([heads_q, heads_kv, heads_kv], 2)
    expected = flash3.flash_attn_func(q, k, v, 0.3, causal, return_lse=True)
    results = flash3.flash_attn_qkvpacked_func(
        qkv, 0.3, causal, num_heads_q=heads_q, return_lse=True
    )
    if heads_q == heads_kv:
        five = flash3.flash_attn_qkvpacked_func(qkv.unflatten(2, (3, -1)), 0.3, causal)
        assert torch.equal(five, expected[0])
    gradients = [
        torch.autograd.grad(out.sin().sum() + lse.sum(), qkv)[0] for out, lse in (results, expected)
    ]
    assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True))
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("shape", "num_heads_q", "message"),
    [
        ((2, 9, 6, 16), None, "qkv: must be (batch, seqlen, 3, heads, head_dim)"),
        ((2, 9, 2, 4, 16), None, "qkv: must be (batch, seqlen, 3, heads, head_dim)"),
        ((2, 9, 3, 4, 16), 4, "qkv: must be (batch, seqlen, heads, head_dim)"),
        ((2, 9, 6, 16), 3, "num_heads_q: must leave an even number of qkv's 6 heads"),
        ((2, 9, 6, 16), 6, "num_heads_q: must leave an even number"),
        ((2, 9, 6, 16), 0, "num_heads_q: must leave an even number"),
    ],
)
def test_qkv_of_another_shape(shape, num_heads_q, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        flash3.flash_attn_qkvpacked_func(torch.zeros(shape), num_heads_q=num_heads_q)


def test_qkv_of_another_kind():
    with pytest.raises(TypeError, match=r"qkv: must be a torch\.Tensor, got list"):
        flash3.flash_attn_qkvpacked_func([1])
    with pytest.raises(TypeError, match=r"num_heads_q: must be an int or None, got 2\.0"):
        flash3.flash_attn_qkvpacked_func(torch.zeros(1, 2, 6, 8), num_heads_q=2.0)
