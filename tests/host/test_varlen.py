"""flash_attn_varlen_func on CPU: the reference, its gradients, the operators as torch sees them, argument errors."""

import inspect
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from varlen_cases import SMALL, Batch, both_masks

import flash3
from flash3 import autograd, checks, ops

F64 = torch.float64
SCORES = "int window_left=-1, int window_right=-1, int attention_chunk=0, float softcap=0."


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def small(**changes):
    """A legal call: three sequences, the middle one without keys."""
    q, k, v = (torch.randn(n, h, 16) for n, h in ((10, 4), (12, 2), (12, 2)))
    call = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": int32(0, 3, 7, 10),
        "cu_seqlens_k": int32(0, 5, 5, 12),
        "max_seqlen_q": 4,
        "max_seqlen_k": 7,
    }
    return {**call, **changes}


def operands(**fields):
    """Arguments of flash3::varlen_fwd, and the gradients of its results."""
    packed = Batch("ops", (3, 0, 4), (5, 2, 3), behind=2, head_dim=8, **fields).tensors(
        F64, dlse=True
    )
    tensors = [x.requires_grad_() for x in (packed.q, packed.k, packed.v)]
    return (*tensors, packed.cu_seqlens_q, packed.cu_seqlens_k, None, None, 0.3, True), packed


def test_parameters_are_those_of_flash_attention_3():
    dense = list(inspect.signature(flash3.flash_attn_func).parameters.values())
    varlen = list(inspect.signature(flash3.flash_attn_varlen_func).parameters.values())
    added = [
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "seqused_q",
        "seqused_k",
    ]
    assert [p.name for p in varlen[3:9]] == added
    float8 = ["out_dtype", *(f"{name}_block_descale" for name in "qkv")]  # of dense tensors alone
    dense = [p for p in dense if p.name not in (*added, *float8)]
    assert [(p.name, p.default, p.kind) for p in varlen[:3] + varlen[9:]] == [
        (p.name, p.default, p.kind) for p in dense
    ]


@pytest.mark.parametrize("num_heads", [(2, 2), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("batch", both_masks(SMALL), ids=str)
def test_every_sequence_by_itself(batch, num_heads):
    batch = batch.with_(head_dim=16, num_heads_q=num_heads[0], num_heads_kv=num_heads[1])
    packed = batch.tensors(F64, dlse=True)
    result = packed.run(causal=batch.causal, softmax_scale=0.3)
    right = packed.by_formula(F64, causal=batch.causal, softmax_scale=0.3)
    for name in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(result, name), getattr(right, name))


@pytest.mark.parametrize("filler", [math.nan, math.inf])
@pytest.mark.parametrize("batch", both_masks(SMALL), ids=str)
def test_rows_that_no_sequence_uses_have_no_effect(batch, filler):
    packed = batch.tensors(torch.float32, dlse=True)
    clean, poisoned = (x.run(causal=batch.causal) for x in (packed, packed.poisoned(filler)))
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(getattr(clean, name), getattr(poisoned, name)), name
    rows, keys = ~packed.used(0), ~packed.used(1)
    assert (poisoned.out[rows] == 0).all() and (poisoned.lse[:, rows] == -math.inf).all()
    assert all((x == 0).all() for x in (poisoned.dq[rows], poisoned.dk[keys], poisoned.dv[keys]))


def test_equal_lengths_are_the_dense_call():
    q, k, v = (torch.randn(3, n, 2, 16) for n in (9, 13, 13))
    dense, dense_lse = flash3.flash_attn_func(q, k, v, causal=True, return_lse=True)
    packed, lse = flash3.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)),
        int32(0, 9, 18, 27),
        int32(0, 13, 26, 39),
        9,
        13,
        causal=True,
        return_lse=True,
    )
    assert torch.equal(packed.view_as(dense), dense)
    assert torch.equal(lse.view(2, 3, 9).transpose(0, 1), dense_lse)


def test_results():
    out = flash3.flash_attn_varlen_func(**small())
    again, lse = flash3.flash_attn_varlen_func(**small(), return_lse=True)
    assert isinstance(out, torch.Tensor) and out.is_contiguous() and again.shape == (10, 4, 16)
    assert lse.shape == (4, 10) and lse.dtype == torch.float32 and lse.is_contiguous()
    assert (lse[:, 3:7] == -math.inf).all() and (again[3:7] == 0).all()
    assert flash3.flash_attn_varlen_func(**small(), return_attn_probs=True)[1].shape == (4, 10)


@pytest.mark.parametrize(
    "longest", [torch.tensor(4), torch.tensor([4]), torch.tensor(4, dtype=torch.int32)]
)
def test_max_seqlen_may_be_a_tensor(longest):
    call = small(max_seqlen_q=longest, max_seqlen_k=longest)
    assert flash3.flash_attn_varlen_func(**call).shape == (10, 4, 16)


def test_no_sequence():
    out, lse = flash3.flash_attn_varlen_func(
        **small(cu_seqlens_q=int32(0), cu_seqlens_k=int32(0)), return_lse=True
    )
    assert (out == 0).all() and (lse == -math.inf).all()


def test_schemas():
    sequences = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k"
    assert str(ops.varlen_fwd._schema) == (
        f"flash3::varlen_fwd(Tensor q, Tensor k, Tensor v, {sequences}, float softmax_scale, bool causal,"
        f" int order=0, Tensor? sink=None, {SCORES}) -> (Tensor out, Tensor lse)"
    )
    assert str(ops.varlen_bwd._schema) == (
        "flash3::varlen_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse,"
        f" {sequences}, float softmax_scale, bool causal, int order, {SCORES})"
        " -> (Tensor dq, Tensor dk, Tensor dv)"
    )


@pytest.mark.slow
def test_opcheck_forward():
    torch.library.opcheck(ops.varlen_fwd, operands(num_heads_q=4)[0])


@pytest.mark.slow
def test_opcheck_backward():
    arguments, packed = operands()
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    q, k, v, *rest = arguments
    out, lse = ops.varlen_fwd(*arguments)
    torch.library.opcheck(
        ops.varlen_bwd, (packed.dout, q, k, v, out, lse, packed.dlse, *rest, True)
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_have_the_shapes_of_real_ones(device):
    with FakeTensorMode():
        q = torch.empty(4, 7, 16, dtype=torch.bfloat16, device=device).transpose(0, 1)
        k, v = (torch.empty(9, 2, 16, dtype=torch.bfloat16, device=device) for _ in range(2))
        cu = torch.empty(3, dtype=torch.int32, device=device)
        out, lse = ops.varlen_fwd(q, k, v, cu, cu, None, None, 0.3, True)
        grads = ops.varlen_bwd(out, q, k, v, out, lse, None, cu, cu, None, None, 0.3, True, False)
    assert out.shape == q.shape and out.is_contiguous() and out.device.type == device
    assert lse.shape == (4, 7) and lse.dtype == torch.float32
    assert all(
        g.shape == x.shape and g.is_contiguous() for g, x in zip(grads, (q, k, v), strict=True)
    )


@pytest.mark.parametrize("which", ["out", "lse", "both"])
def test_both_roads_give_the_same_gradients(which):
    arguments, packed = operands()
    outputs, grads = {
        "out": (slice(0, 1), (packed.dout,)),
        "lse": (slice(1, 2), (packed.dlse,)),
        "both": (slice(0, 2), (packed.dout, packed.dlse)),
    }[which]
    roads = ops.varlen_fwd, autograd.VarlenFlashAttention.apply
    results = [
        torch.autograd.grad(road(*arguments, True)[outputs], arguments[:3], grads) for road in roads
    ]
    for registered, eager in zip(*results, strict=True):
        assert torch.equal(registered, eager)


def test_gradcheck_with_lse():
    batch = Batch(
        "check", (3, 0, 2), (2, 1, 4), behind=1, head_dim=8, num_heads_q=2, num_heads_kv=1
    )
    packed = batch.tensors(F64)
    tensors = [x.requires_grad_() for x in (packed.q, packed.k, packed.v)]

    def attention(q, k, v):
        out, lse = flash3.flash_attn_varlen_func(
            q, k, v, packed.cu_seqlens_q, packed.cu_seqlens_k, 3, 4, causal=True, return_lse=True
        )
        return out, lse.masked_fill(lse.isneginf(), 0.0)

    torch.autograd.gradcheck(attention, tensors)


def test_second_derivatives_raise():
    q, k, v = (x.requires_grad_() for x in (torch.randn(4, 1, 8, dtype=F64) for _ in "qkv"))
    out = flash3.flash_attn_varlen_func(q, k, v, int32(0, 4), int32(0, 4), 4, 4)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        dq.sum().backward()


def test_compiled_into_one_graph():
    torch._dynamo.reset()

    def attention(call):
        return flash3.flash_attn_varlen_func(**call, causal=True, return_lse=True)[0].sin()

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    call = small(max_seqlen_q=torch.tensor(4))
    torch.testing.assert_close(compiled(call), attention(call))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": torch.randn(1, 10, 4, 16)}, ValueError, "q: must be (rows, heads, head_dim)"),
        ({"v": torch.randn(12, 2, 12)}, ValueError, "v: head_dim must be a multiple of 8"),
        (
            {"v": torch.randn(11, 2, 16)},
            ValueError,
            "v: must have k's shape (12, 2, 16) but for head_dim",
        ),
        ({"k": torch.randn(12, 3, 16)}, ValueError, "a positive multiple"),
        ({"k": torch.randn(12, 2, 24)}, ValueError, "k: must have q's head_dim 16"),
        ({"q": torch.randn(10, 4, 16).half()}, TypeError, "must share one dtype"),
        (
            {"cu_seqlens_q": [0, 3, 7, 10]},
            TypeError,
            "cu_seqlens_q: must be a torch.Tensor, got list",
        ),
        (
            {"cu_seqlens_k": int32(0, 5, 5, 12).long()},
            TypeError,
            "cu_seqlens_k: dtype must be torch.int32",
        ),
        (
            {"cu_seqlens_k": int32(0, 5, 12)},
            ValueError,
            "cu_seqlens_k: must have shape (4,), got (3,)",
        ),
        ({"cu_seqlens_q": int32()}, ValueError, "cu_seqlens_q: must hold batch + 1 numbers"),
        ({"cu_seqlens_q": int32(0, 3, 7, 10)[None]}, ValueError, "shape (batch + 1,), got (1, 4)"),
        ({"cu_seqlens_q": int32(*range(8))[::2]}, ValueError, "cu_seqlens_q: must be contiguous"),
        (
            {"cu_seqlens_q": int32(0, 1, 2, 3).to("meta")},
            ValueError,
            "cu_seqlens_q: must be on q's device",
        ),
        ({"seqused_q": int32(1, 2)}, ValueError, "seqused_q: must have shape (3,), got (2,)"),
        ({"seqused_k": int32(1, 2, 3).float()}, TypeError, "seqused_k: dtype must be torch.int32"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q: must not be negative, got -1"),
        ({"max_seqlen_k": 2.5}, TypeError, "max_seqlen_k: must be an int"),
        ({"max_seqlen_k": None}, TypeError, "max_seqlen_k: must be an int"),
        ({"max_seqlen_k": True}, TypeError, "max_seqlen_k: must be an int"),
        ({"max_seqlen_k": torch.tensor(2.5)}, TypeError, "max_seqlen_k: must be an int"),
        ({"softcap": -1.0}, ValueError, "softcap: must be positive"),
        ({"window_size": (-2, 0)}, ValueError, "window_size: left and right must be -1"),
        ({"learnable_sink": torch.zeros(2)}, ValueError, "learnable_sink: must have shape (4,)"),
        ({"causal": 1}, TypeError, "causal: must be True or False"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale: must be positive"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_argument_is_named(changes, error, message):
    with pytest.raises(error) as caught:
        flash3.flash_attn_varlen_func(**small(**changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": int32(1, 3, 7, 10)}, "cu_seqlens_q: must start with 0, got 1"),
        (
            {"cu_seqlens_k": int32(0, 5, 4, 12)},
            "cu_seqlens_k: must never fall, got 5 at index 1 and 4 at",
        ),
        ({"cu_seqlens_k": int32(0, 5, 5, 13)}, "at most the 12 rows of k, got 13 at index 3"),
        (
            {"max_seqlen_k": 6},
            "max_seqlen_k: must be at least every length, got 6, sequence 2 has 7",
        ),
        ({"max_seqlen_q": torch.tensor(3)}, "max_seqlen_q: must be at least every length, got 3"),
        (
            {"seqused_q": int32(3, 5, 0)},
            "seqused_q: must be from 0 to the length of its slot, 4, got 5 at index 1",
        ),
        (
            {"seqused_k": int32(-1, 0, 0)},
            "seqused_k: must be from 0 to the length of its slot, 5, got -1",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_contents_are_named_in_debug_mode(changes, message, monkeypatch):
    monkeypatch.setattr(checks, "DEBUG", True)
    flash3.flash_attn_varlen_func(**small())
    with pytest.raises(ValueError) as caught:
        flash3.flash_attn_varlen_func(**small(**changes))
    assert message in str(caught.value)
