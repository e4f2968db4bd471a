"""The operators with windows, chunks, softcap and sinks as torch sees them: opcheck, fake tensors, roads, compile."""

import pytest
import torch
from attention_math import attention_math
from cases import Case
from torch._subclasses.fake_tensor import FakeTensorMode
from varlen_cases import Batch

import flash3
from flash3 import autograd, ops

F64 = torch.float64
SCORES = (4, 2, 6, 0.8)  # window_left, window_right, attention_chunk, softcap
ARGUMENTS = {"window_size": (4, 2), "attention_chunk": 6, "softcap": 0.8}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def dense(requires_grad=True):
    """Arguments of flash3::fwd, and gradients of its results."""
    inputs = Case(7, 10, 8, num_heads_q=4).inputs(F64, dlse=True)
    leaves = [inputs.q, inputs.k, inputs.v, torch.randn(4, dtype=F64)]
    q, k, v, sink = (x.requires_grad_(requires_grad) for x in leaves)
    return (q, k, v, 0.3, True, True, sink, *SCORES), (inputs.dout, inputs.dlse)


def packed(requires_grad=True):
    batch = Batch("ops", (3, 0, 4), (5, 2, 3), behind=2, head_dim=8, num_heads_q=4).tensors(
        F64, dlse=True
    )
    leaves = [batch.q, batch.k, batch.v, torch.randn(4, dtype=F64)]
    q, k, v, sink = (x.requires_grad_(requires_grad) for x in leaves)
    sequences = batch.cu_seqlens_q, batch.cu_seqlens_k, None, None
    return (q, k, v, *sequences, 0.3, True, True, sink, *SCORES), (batch.dout, batch.dlse)


KINDS = {
    "dense": (dense, ops.fwd, ops.bwd, autograd.FlashAttention),
    "packed": (packed, ops.varlen_fwd, ops.varlen_bwd, autograd.VarlenFlashAttention),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def backward_arguments(kind):
    """Of flash3::bwd and of flash3::sink_bwd."""
    make, fwd, _, _ = kind
    arguments, (dout, dlse) = make(requires_grad=False)
    q, k, v, *sequences, scale, causal, deterministic, sink = arguments[:-4]
    out, lse = fwd(*arguments)
    rest = (*sequences, scale, causal, deterministic, *SCORES)
    return (dout, q, k, v, out, lse, dlse, *rest), (dout, out, lse, dlse, sink)


@pytest.mark.slow
@kinds
def test_opcheck_forward(kind):
    make, fwd, _, _ = kind
    torch.library.opcheck(fwd, make()[0])


@pytest.mark.slow
@kinds
def test_opcheck_of_some_arguments_only(kind):
    """The dispatcher leaves out what has its default value at the end."""
    make, fwd, _, _ = kind
    arguments = list(make()[0])
    torch.library.opcheck(fwd, (*arguments[:-4],))
    arguments[-5] = None
    torch.library.opcheck(fwd, (*arguments[:-3],))


@pytest.mark.slow
@kinds
def test_opcheck_backward(kind):
    for op, arguments in zip((kind[2], ops.sink_bwd), backward_arguments(kind), strict=True):
        torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_gradient_of_the_sink(device, dtype):
    with FakeTensorMode():
        q = torch.empty(2, 7, 4, 16, dtype=torch.bfloat16, device=device)
        sink = torch.empty(4, dtype=dtype, device=device)
        out, lse = ops.fwd(q, q, q, 0.3, True, False, sink, *SCORES)
        dsink = ops.sink_bwd(out, out, lse, None, sink)
    assert out.shape == q.shape and lse.shape == (2, 4, 7)
    assert dsink.shape == (4,) and dsink.dtype == dtype and dsink.device.type == device


@kinds
@pytest.mark.parametrize("which", ["out", "lse", "both"])
@pytest.mark.parametrize("wanted", ["q", "s", "qkv", "qkvs", "vs"])
def test_both_roads_give_the_same_gradients(kind, which, wanted):
    make, fwd, _, node = kind
    arguments, grads = make()
    leaves = dict(zip("qkvs", (*arguments[:3], arguments[-5]), strict=True))
    for name, x in leaves.items():
        x.requires_grad_(name in wanted)
    outputs = {"out": slice(0, 1), "lse": slice(1, 2), "both": slice(0, 2)}[which]
    asked = [leaves[name] for name in wanted]
    results = [
        torch.autograd.grad(
            road(*arguments)[outputs], asked, grads[outputs], materialize_grads=True
        )
        for road in (fwd, node.apply)
    ]
    for registered, eager in zip(*results, strict=True):
        assert torch.equal(registered, eager)


@kinds
def test_what_the_backward_is_given(kind, monkeypatch):
    make, fwd, bwd, node = kind
    name = bwd._schema.name.removeprefix("flash3::")
    for road in (fwd, node.apply):
        seen = []
        monkeypatch.setattr(
            ops, name, lambda *args, seen=seen: seen.append(args[-5:]) or bwd(*args)
        )
        road(*make()[0])[0].sum().backward()
        assert seen == [(True, *SCORES)]


@kinds
def test_a_plain_call_passes_no_more_than_before(kind, monkeypatch):
    make, fwd, bwd, _ = kind
    counts = {}
    for op in (fwd, bwd):
        name = op._schema.name.removeprefix("flash3::")
        monkeypatch.setattr(
            ops, name, lambda *a, op=op, name=name: counts.update({name: len(a)}) or op(*a)
        )
    q, k, v, *rest = make()[0]
    if len(rest) > 8:
        out = flash3.flash_attn_varlen_func(q, k, v, *rest[:2], 4, 5, causal=True)
    else:
        out = flash3.flash_attn_func(q, k, v, causal=True)
    out.sum().backward()
    assert list(counts.values()) == [len(make()[0]) - 5, len(make()[0]) - 5 + 4]


def test_second_derivatives_raise():
    sink = torch.randn(4, dtype=F64, requires_grad=True)
    q, k, v = dense()[0][:3]
    out = flash3.flash_attn_func(q, k, v, learnable_sink=sink)
    (dsink,) = torch.autograd.grad(out.square().sum(), sink, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        dsink.sum().backward()


def test_torch_func_grad():
    """Of the operator: torch refuses the eager node."""
    arguments, _ = dense(requires_grad=False)
    arguments = list(arguments)

    def loss(q, sink):
        arguments[0], arguments[6] = q, sink
        return ops.fwd(*arguments)[0].square().sum()

    q, sink = arguments[0].clone(), arguments[6].clone()
    leaves = [x.clone().requires_grad_() for x in (q, sink)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    try:
        grads = torch.func.grad(loss, argnums=(0, 1))(q, sink)
    except RuntimeError as error:
        assert "functorch" in str(error)  # torch's own refusal
    else:
        for x, y in zip(grads, expected, strict=True):
            torch.testing.assert_close(x, y)


def attention(q, k, v, sink):
    """With something to fuse around it, and a use of lse."""
    out, lse = flash3.flash_attn_func(
        2 * q, k, v, causal=True, return_lse=True, learnable_sink=sink.exp(), **ARGUMENTS
    )
    return out.sin() + lse.sin().mean()


def gradients(function, case):
    inputs = case.inputs(torch.float32)
    sink = torch.linspace(-1, 1, case.num_heads_q)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, sink)]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, inputs.dout)


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_with_the_eager_results(dynamic):
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    cases = [Case(9, 12, 16, num_heads_q=4, batch=3), Case(17, 33, 16, num_heads_q=4, batch=5)]
    for case in cases if dynamic else cases[:1]:
        for x, y in zip(gradients(compiled, case), gradients(attention, case), strict=True):
            torch.testing.assert_close(x, y)


def test_new_lengths_do_not_recompile():
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    gradients(compiled, Case(9, 12, 16, num_heads_q=4, batch=3))
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ((17, 33), (40, 41), (30, 7)):
            gradients(compiled, Case(*lengths, 16, num_heads_q=4, batch=3))


def test_windows_and_caps_as_arguments_of_a_graph():
    def call(q, k, v, left, chunk, softcap):
        return flash3.flash_attn_func(
            q, k, v, window_size=(left, 1), attention_chunk=chunk, softcap=softcap
        )

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    inputs = Case(9, 12, 16).inputs(torch.float32)
    tensors = inputs.q, inputs.k, inputs.v
    for arguments in ((3, 4, 0.5), (5, 7, 1.5), (2, 0, 0.0), (-1, 3, 2.5)):
        torch.testing.assert_close(compiled(*tensors, *arguments), call(*tensors, *arguments))


def test_packed_sequences_compile_into_one_graph():
    arguments, (dout, _) = packed()
    q, k, v, cu_q, cu_k = arguments[:5]
    sink = arguments[-5]

    def call(q, k, v, sink):
        return flash3.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 4, 5, learnable_sink=sink, **ARGUMENTS
        ).sin()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    leaves = q, k, v, sink
    for x, y in zip(
        *(torch.autograd.grad(f(*leaves), leaves, dout) for f in (compiled, call)), strict=True
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_a_loop():
    q, k, v, sink = (
        torch.stack([x.detach(), 2 * x.detach()]) for x in (*dense()[0][:3], dense()[0][6])
    )
    mapped = torch.vmap(
        lambda *x: flash3.flash_attn_func(*x[:3], learnable_sink=x[3], **ARGUMENTS)
    )(q, k, v, sink)
    right = attention_math(q[1], k[1], v[1], learnable_sink=sink[1], **ARGUMENTS)[0]
    torch.testing.assert_close(mapped[1], right)
