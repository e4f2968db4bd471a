"""Dense calls with seqused_q and seqused_k, and the keyword batch_invariant, on CPU."""

import inspect
import math

import pytest
import torch

import flash3
from flash3 import checks, ops
from flash3.checks_options import SAME_IN_EVERY_BATCH

F64 = torch.float64
EVERYTHING = {"window_size": (6, 2), "attention_chunk": 9, "softcap": 0.7}
USED_Q, USED_K = (9, 0, 4), (5, 7, 13)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def tensors(requires_grad=True):
    shapes = (3, 9, 4, 16), (3, 13, 2, 16), (3, 13, 2, 16), (4,)
    return [torch.randn(*s, dtype=F64).requires_grad_(requires_grad) for s in shapes]


@pytest.mark.parametrize("used_q", [None, USED_Q], ids=str)
@pytest.mark.parametrize("used_k", [None, USED_K], ids=str)
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, EVERYTHING], ids=str)
def test_each_sequence_is_the_call_of_its_used_rows(used_q, used_k, arguments):
    q, k, v, sink = leaves = tensors()
    given = {
        "seqused_q": None if used_q is None else int32(*used_q),
        "seqused_k": None if used_k is None else int32(*used_k),
    }
    arguments = {**arguments, "learnable_sink": sink, "return_lse": True}
    out, lse = flash3.flash_attn_func(q, k, v, **given, **arguments)
    assert out.shape == q.shape and lse.shape == (3, 4, 9)
    assert out.is_contiguous() and lse.is_contiguous()
    right_out, right_lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for b in range(3):
        rows, keys = slice((used_q or (9,) * 3)[b]), slice((used_k or (13,) * 3)[b])
        one_out, one_lse = flash3.flash_attn_func(
            q[b : b + 1, rows], k[b : b + 1, keys], v[b : b + 1, keys], **arguments
        )
        right_out[b, rows], right_lse[b, :, rows] = one_out[0], one_lse[0]
    torch.testing.assert_close(out, right_out)
    torch.testing.assert_close(lse, right_lse)
    used = lse.isfinite()
    gradients = [
        torch.autograd.grad(x.sin().sum() + y[used].sum(), leaves, retain_graph=True)
        for x, y in ((out, lse), (right_out, right_lse))
    ]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y)


def test_rows_that_are_not_used_have_no_effect():
    q, k, v, sink = tensors(requires_grad=False)
    given = {"seqused_q": int32(*USED_Q), "seqused_k": int32(*USED_K), "learnable_sink": sink}
    clean = flash3.flash_attn_func(q, k, v, **given)
    for b in range(3):
        q[b, USED_Q[b] :] = math.nan
        k[b, USED_K[b] :] = math.nan
        v[b, USED_K[b] :] = math.inf
    assert torch.equal(flash3.flash_attn_func(q, k, v, **given), clean)


def test_qkv_in_one_tensor():
    qkv = torch.randn(3, 9, 3, 4, 16, dtype=F64)
    used = int32(9, 0, 4)
    out = flash3.flash_attn_qkvpacked_func(qkv, causal=True, seqused=used)
    right = flash3.flash_attn_func(*qkv.unbind(2), causal=True, seqused_q=used, seqused_k=used)
    assert torch.equal(out, right)


def test_nothing_is_copied(monkeypatch):
    """Tensors of a packed projection stay views."""
    seen = []
    real = ops.varlen_fwd
    monkeypatch.setattr(ops, "varlen_fwd", lambda *args: seen.append(args[:3]) or real(*args))
    qkv = torch.randn(3, 9, 3, 4, 16)
    flash3.flash_attn_func(*qkv.unbind(2), seqused_k=int32(1, 2, 3))
    assert all(x.untyped_storage().data_ptr() == qkv.data_ptr() for x in seen[0])


def test_one_graph():
    torch._dynamo.reset()

    def call(q, k, v, sink, used):
        return flash3.flash_attn_func(
            q, k, v, seqused_k=used, learnable_sink=sink, causal=True
        ).sin()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    leaves, used = tensors(), int32(*USED_K)
    for x, y in zip(
        *(torch.autograd.grad(f(*leaves, used).sum(), leaves) for f in (compiled, call)),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([1, 2, 3], TypeError, "must be a torch.Tensor, got list"),
        (int32(1, 2, 3).long(), TypeError, "dtype must be torch.int32"),
        (int32(1, 2), ValueError, "must have shape (3,), got (2,)"),
        (int32(1, 2, 3).to("meta"), ValueError, "must be on q's device cpu"),
        (torch.zeros(6, dtype=torch.int32)[::2], ValueError, "must be contiguous"),
    ],
    ids=str,
)
def test_wrong_seqused_is_named(name, value, error, message):
    with pytest.raises(error) as caught:
        flash3.flash_attn_func(*tensors()[:3], **{name: value})
    assert f"{name}: {message}" in str(caught.value)


def test_more_rows_than_a_packed_tensor_may_have():
    q, k = (torch.zeros(1, s, 1, 8, dtype=torch.float16, device="meta") for s in (2**30 + 1, 4))
    used = torch.zeros(1, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=r"at most 2\^30 rows"):
        flash3.flash_attn_func(q, k, k, seqused_k=used)


def test_wrong_lengths_are_named_in_debug_mode(monkeypatch):
    monkeypatch.setattr(checks, "DEBUG", True)
    with pytest.raises(ValueError, match=r"seqused_k: .* its slot, 13, got 14 at index 1"):
        flash3.flash_attn_func(*tensors()[:3], seqused_k=int32(3, 14, 1))


def batch_invariant(function, q, k, v):
    ends = int32(0, q.shape[1])
    if function == "varlen":
        packed = (x[0] for x in (q, k, v))
        lengths = q.shape[1], k.shape[1]
        return flash3.flash_attn_varlen_func(
            *packed, ends, int32(0, k.shape[1]), *lengths, batch_invariant=True
        )
    return flash3.flash_attn_func(q, k, v, batch_invariant=True)


@pytest.mark.parametrize("heads_kv", [1, 2])
@pytest.mark.parametrize("function", ["dense", "varlen"])
def test_batch_invariant_gradients_are_summed_in_their_order(function, heads_kv, monkeypatch):
    q, k, v = (torch.randn(1, 7, h, 8, requires_grad=True) for h in (2, heads_kv, heads_kv))
    seen = []
    name = "bwd" if function == "dense" else "varlen_bwd"
    real = getattr(ops, name)
    monkeypatch.setattr(ops, name, lambda *args: seen.append(args[-1]) or real(*args))
    batch_invariant(function, q, k, v).sum().backward()
    assert seen == [SAME_IN_EVERY_BATCH]


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_batch_invariant_is_a_bool(value):
    with pytest.raises(TypeError, match="batch_invariant: must be True or False"):
        flash3.flash_attn_func(*tensors()[:3], batch_invariant=value)


def test_keywords_only():
    parameters = inspect.signature(flash3.flash_attn_func).parameters
    for name in ("learnable_sink", "seqused_q", "seqused_k", "batch_invariant"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
