"""Gradients of flash_attn_fp8_func, and its operators as torch sees them."""

import pytest
import torch
from cases import Case

import flash3
from flash3 import autograd_fp8, fp8, ops, ops_fp8, reference
from flash3.reference_fp8 import BLOCK, E4M3, dequantize

# The schema test compares tensors by allclose, which torch lacks for float8.
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def leaves(seqlen=130, head_dim=64, **fields):
    inputs = Case(
        seqlen, seqlen, head_dim, num_heads_q=4, num_heads_kv=2, batch=1, **fields
    ).inputs(torch.bfloat16, dlse=True)
    return [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)], inputs


def right_gradients(inputs, causal, dlse=None):
    q, k, v, dout = (x.detach().double() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    scale = q.shape[-1] ** -0.5
    out, lse = reference.attention_forward(q, k, v, scale, causal)
    return reference.attention_backward(dout, q, k, v, out, lse, dlse, scale, causal)


def errors(grads, right):
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(grads, right, strict=True)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_are_right_to_a_few_percent(causal, hadamard, with_lse):
    tensors, inputs = leaves(causal=causal)
    outputs = flash3.flash_attn_fp8_func(
        *tensors, causal=causal, hadamard=hadamard, return_lse=True
    )
    gradients = (inputs.dout, inputs.dlse) if with_lse else (inputs.dout,)
    grads = torch.autograd.grad(outputs[: len(gradients)], tensors, gradients)
    right = right_gradients(inputs, causal, inputs.dlse.double() if with_lse else None)
    assert max(errors(grads, right)) < 0.05


def test_recompute_gives_the_gradients_of_16_bit_attention():
    tensors, inputs = leaves(causal=True)
    ours = [
        torch.autograd.grad(function(*tensors, causal=True), tensors, inputs.dout)
        for function in (
            lambda *x, causal: flash3.flash_attn_fp8_func(*x, causal=causal, recompute=True),
            flash3.flash_attn_func,
        )
    ]
    assert all(torch.equal(a, b) for a, b in zip(*ours, strict=True))


def test_original_tensors_give_better_gradients_than_dequantised_ones():
    """The choice of docs/numerics.md, on N(0, 1)."""
    tensors, inputs = leaves(256)
    grads = torch.autograd.grad(flash3.flash_attn_fp8_func(*tensors), tensors, inputs.dout)
    right = right_gradients(inputs, False)
    x = fp8.quantize_qkv(*(t.detach() for t in tensors), hadamard=False, transpose_v=False)
    pairs = (x.q, x.q_descale), (x.k, x.k_descale), (x.v, x.v_descale)
    rounded = [dequantize(stored, descale, 128).double() for stored, descale in pairs]
    scale = rounded[0].shape[-1] ** -0.5
    out, lse = reference.attention_forward(*rounded, scale, False)
    dout = inputs.dout.double()
    consistent = reference.attention_backward(dout, *rounded, out, lse, None, scale, False)
    assert all(
        a < 0.6 * b for a, b in zip(errors(grads, right), errors(consistent, right), strict=True)
    )


def test_large_scores_need_recompute():
    """Where float8 gets lse wrong, exp(score - lse) does not sum to 1: what docs/numerics.md warns of."""
    tensors, inputs = leaves(128)
    with torch.no_grad():
        for x in tensors[:2]:
            x[..., :3] *= 10
    right = right_gradients(inputs, False)
    plain, recomputed = (
        torch.autograd.grad(
            flash3.flash_attn_fp8_func(*tensors, recompute=recompute), tensors, inputs.dout
        )
        for recompute in (False, True)
    )
    assert max(errors(plain, right)) > 0.1 > 2 * max(errors(recomputed, right))


@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(0, 2)])
@pytest.mark.parametrize("recompute", [False, True])
def test_both_roads_give_the_same_gradients(which, recompute):
    tensors, inputs = leaves(40)
    roads = ops_fp8.fp8_attention, autograd_fp8.Fp8FlashAttention.apply
    grads = (inputs.dout, inputs.dlse)[which]
    registered, eager = (
        torch.autograd.grad(
            road(*tensors, 0.3, True, False, 64, True, 1, 0, recompute)[which], tensors, grads
        )
        for road in roads
    )
    assert all(torch.equal(a, b) for a, b in zip(registered, eager, strict=True))


def test_deterministic_reaches_the_backward(monkeypatch):
    seen = []
    real = ops.bwd
    monkeypatch.setattr(ops, "bwd", lambda *args: seen.append(args[-1]) or real(*args))
    for deterministic in (False, True):
        tensors, _ = leaves(8)
        flash3.flash_attn_fp8_func(*tensors, deterministic=deterministic).sum().backward()
    assert seen == [False, True]


@pytest.mark.slow
def test_opcheck():
    tensors, _ = leaves(40)
    torch.library.opcheck(
        ops_fp8.fp8_attention, (*tensors, 0.3, True, False, 64, True, 1, 0, False)
    )
    plain = [x.detach() for x in tensors]
    angle = torch.rand(40, 16)
    for granularity in range(3):
        for transpose_v in (False, True):
            arguments = angle.cos(), angle.sin(), False, granularity, 64, True, 7, transpose_v
            torch.library.opcheck(
                ops_fp8.quantize_qkv, (*plain, *arguments), test_utils=WITHOUT_SCHEMA
            )
    stored = ops_fp8.quantize_qkv(*plain, None, None, False, BLOCK, 64, True, 7, True)
    torch.library.opcheck(
        ops_fp8.fp8_fwd,
        (*stored, 64, 64, 64, 0.3, 1.0, True, True, torch.float16, 0),
        test_utils=WITHOUT_SCHEMA,
    )


@pytest.mark.slow
def test_compiles_into_one_graph():
    tensors, inputs = leaves(40)
    compiled = torch.compile(
        lambda q, k, v: flash3.flash_attn_fp8_func(q, k, v, causal=True),
        fullgraph=True,
        backend="aot_eager",
    )
    out = compiled(*tensors)
    eager = flash3.flash_attn_fp8_func(*tensors, causal=True)
    assert torch.equal(out, eager)
    grads = [torch.autograd.grad(x, tensors, inputs.dout) for x in (out, eager)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    stored = [x.detach().to(E4M3) for x in tensors]
    attend = torch.compile(
        lambda q, k, v: flash3.flash_attn_func(q, k, v, k_descale=torch.full((1, 2), 0.5)),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(attend(*stored), flash3.flash_attn_func(*stored, k_descale=0.5))
