"""The operators as torch sees them: schemas, fake implementations, opcheck, both roads of autograd."""

import pytest
import torch
from cases import Case, by_length
from torch._subclasses.fake_tensor import FakeTensorMode

import flash3
from flash3 import autograd, ops

SCORES = "int window_left=-1, int window_right=-1, int attention_chunk=0, float softcap=0."


def leaves(dtype=torch.float64, **fields):
    inputs = Case(7, 10, 8, **fields).inputs(dtype)
    return [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]


def test_schemas():
    assert str(ops.fwd._schema) == (
        "flash3::fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, int order=0,"
        f" Tensor? sink=None, {SCORES}) -> (Tensor out, Tensor lse)"
    )
    assert str(ops.bwd._schema) == (
        "flash3::bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse,"
        f" float softmax_scale, bool causal, int order, {SCORES})"
        " -> (Tensor dq, Tensor dk, Tensor dv)"
    )
    assert str(ops.sink_bwd._schema) == (
        "flash3::sink_bwd(Tensor dout, Tensor out, Tensor lse, Tensor? dlse, Tensor sink) -> Tensor dsink"
    )
    assert not any(op._schema.is_mutable for op in (ops.fwd, ops.bwd, ops.sink_bwd))


@pytest.mark.slow
@pytest.mark.parametrize("order", [(), (1,)])
def test_opcheck_forward(order):
    torch.library.opcheck(ops.fwd, (*leaves(num_heads_q=4), 0.3, True, *order))


@pytest.mark.slow
def test_opcheck_backward():
    inputs = Case(7, 10, 8).inputs(torch.bfloat16, dlse=True)
    out, lse = ops.fwd(inputs.q, inputs.k, inputs.v, 0.3, True)
    torch.library.opcheck(
        ops.bwd, (inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, inputs.dlse, 0.3, True, True)
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(dtype, device):
    with FakeTensorMode():
        q = torch.empty(2, 4, 7, 16, dtype=dtype, device=device).transpose(1, 2)
        k, v = (torch.empty(2, 9, 2, 16, dtype=dtype, device=device) for _ in range(2))
        out, lse = ops.fwd(q, k, v, 0.3, True)
        grads = ops.bwd(out, q, k, v, out, lse, None, 0.3, True, False)
    assert (
        out.shape == q.shape
        and out.is_contiguous()
        and out.dtype == dtype
        and out.device.type == device
    )
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert lse.shape == (2, 4, 7) and lse.is_contiguous() and lse.dtype == lse_dtype
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.shape == x.shape and grad.is_contiguous() and grad.dtype == dtype


@pytest.mark.parametrize("case", by_length([(7, 10), (10, 7)], head_dim=8), ids=str)
@pytest.mark.parametrize("which", ["out", "lse", "both"])
def test_both_roads_give_the_same_gradients(case, which):
    inputs = case.inputs(torch.float64, dlse=True)
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    outputs, grads = {
        "out": (slice(0, 1), (inputs.dout,)),
        "lse": (slice(1, 2), (inputs.dlse,)),
        "both": (slice(0, 2), (inputs.dout, inputs.dlse)),
    }[which]
    roads = ops.fwd, autograd.FlashAttention.apply
    results = [
        torch.autograd.grad(road(*tensors, 0.3, case.causal, True)[outputs], tensors, grads)
        for road in roads
    ]
    for registered, eager in zip(*results, strict=True):
        assert torch.equal(registered, eager)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize(
    "road", [ops.fwd, autograd.FlashAttention.apply], ids=["registered", "eager"]
)
def test_order_reaches_the_backward(road, order, monkeypatch):
    seen = []
    real = ops.bwd
    monkeypatch.setattr(ops, "bwd", lambda *args: seen.append(args[9]) or real(*args))
    road(*leaves(), 0.3, False, order)[0].sum().backward()
    assert seen == [order]


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv"])
def test_gradients_of_some_inputs_only(wanted):
    tensors = dict(zip("qkv", leaves(), strict=True))
    for name, x in tensors.items():
        x.requires_grad_(name in wanted)
    flash3.flash_attn_func(**tensors).sum().backward()
    assert all((x.grad is not None) == (name in wanted) for name, x in tensors.items())


def test_no_graph_is_recorded_unless_asked_for():
    tensors = leaves()
    with torch.no_grad():
        assert flash3.flash_attn_func(*tensors).grad_fn is None
    with torch.inference_mode():
        assert flash3.flash_attn_func(*tensors).is_inference()
    assert flash3.flash_attn_func(*(x.detach() for x in tensors)).grad_fn is None
    assert flash3.flash_attn_func(*tensors).grad_fn is not None


def test_input_changed_in_place_before_the_backward_is_noticed():
    q, k, v = leaves()
    q = q * 1.0
    out = flash3.flash_attn_func(q, k, v)
    q.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("road", ["function", "operator"])
def test_second_derivatives_raise(road):
    tensors = leaves()
    out = (
        flash3.flash_attn_func(*tensors) if road == "function" else ops.fwd(*tensors, 0.3, False)[0]
    )
    (dq,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        dq.sum().backward()


def test_forward_mode_raises():
    q, k, v = (x.detach() for x in leaves())
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: flash3.flash_attn_func(q, k, v), (q,), (q,))
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="forward-mode"),
    ):
        flash3.flash_attn_func(torch.autograd.forward_ad.make_dual(q, q), k, v)


def test_torch_func_grad_is_right_or_raises():
    q, k, v = (x.detach() for x in leaves())
    expected = torch.autograd.grad(flash3.flash_attn_func(q.requires_grad_(), k, v).sum(), q)[0]
    try:
        grad = torch.func.grad(lambda q: flash3.flash_attn_func(q, k, v).sum())(q.detach())
    except RuntimeError as error:
        assert "functorch" in str(error)  # torch's own refusal
    else:
        torch.testing.assert_close(grad, expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_a_loop():
    q, k, v = (torch.stack([x.detach(), 2 * x.detach()]) for x in leaves())
    mapped = torch.vmap(lambda q, k, v: flash3.flash_attn_func(q, k, v))(q, k, v)
    torch.testing.assert_close(mapped[1], flash3.flash_attn_func(q[1], k[1], v[1]))


def test_activation_checkpointing():
    tensors = leaves()
    plain = torch.autograd.grad(flash3.flash_attn_func(*tensors).square().sum(), tensors)
    out = torch.utils.checkpoint.checkpoint(flash3.flash_attn_func, *tensors, use_reentrant=False)
    for x, y in zip(plain, torch.autograd.grad(out.square().sum(), tensors), strict=True):
        assert torch.equal(x, y)
