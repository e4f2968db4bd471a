"""flash3 as torch's flash attention: the operators below varlen_attn and nested tensors, and context parallelism.

``on_cpu`` is that of test_sdpa.py: the operators run flash3 on CPU tensors, behind torch's dispatcher.
"""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention_math import attention_math, run, run_float64
from cases import Case, both_masks

from flash3 import sdpa

aten = torch.ops.aten

CASES = both_masks([Case(9, 9, 16, num_heads_q=4, num_heads_kv=hk) for hk in (4, 2, 1)])
UNEQUAL = both_masks([Case(5, 9, 8), Case(9, 5, 8, num_heads_q=4), Case(1, 7, 8, batch=1)])


@pytest.fixture
def on_cpu():
    overrides = sdpa._Overrides("CPU")
    yield
    overrides.remove()


@pytest.mark.parametrize("window", [(None, None), (-1, -1), (-1, 0), (None, 0)], ids=str)
@pytest.mark.parametrize("case", CASES + UNEQUAL, ids=str)
def test_flash_operator_and_its_gradients(case, window, on_cpu):
    left, right = window

    def attention(q, k, v):
        lengths = q.shape[1], k.shape[1]
        return aten._flash_attention_forward(
            q, k, v, None, None, *lengths, 0.0, case.causal, False,
            scale=0.3, window_size_left=left, window_size_right=right,
        )[:2]  # fmt: skip

    causal = case.causal or right == 0
    inputs = case.inputs(torch.float64)
    result = run(lambda *qkv: attention(*qkv)[0], inputs)
    expected = run_float64(inputs, causal=causal, softmax_scale=0.3)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name))
    lse = attention(inputs.q, inputs.k, inputs.v)[1]
    torch.testing.assert_close(
        lse, attention_math(inputs.q, inputs.k, inputs.v, causal=causal, softmax_scale=0.3)[1]
    )


@pytest.mark.parametrize("layout", ["contiguous", "odd"])
def test_flash_operator_returns_the_layout_of_its_inputs(layout, on_cpu):
    inputs = Case(9, 9, 8).inputs(torch.float32)
    tensors = inputs.q, inputs.k, inputs.v, inputs.dout
    if layout == "odd":
        tensors = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in tensors]
    q, k, v, dout = tensors
    out, lse, *_ = aten._flash_attention_forward(q, k, v, None, None, 9, 9, 0.0, True, False)
    rest = out, lse, None, None, 9, 9, 0.0, True, out, out
    grads = aten._flash_attention_backward(dout, q, k, v, *rest)
    for x, y in zip((q, q, k, v), (out, *grads), strict=True):
        assert y.stride() == torch.empty_like(x).stride()


def test_flash_operator_into_an_output_of_the_caller():
    inputs = CASES[0].inputs(torch.float32)
    args = inputs.q, inputs.k, inputs.v, None, None, 9, 9, 0.0, True, False
    expected, expected_lse, *_ = sdpa._flash_forward(*args, scale=0.3)
    out = torch.empty(2, 4, 9, 16).transpose(1, 2)
    lse = sdpa._flash_forward_into(out, *args, scale=0.3)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


LENGTHS_Q, LENGTHS_K = (3, 0, 7, 2), (5, 4, 7, 1)


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def by_sequence(q, k, v, causal, lengths_k=LENGTHS_K):
    """The formula on (T, H, D) tensors: out and lse (H, T)."""
    parts = (x.split(n) for x, n in ((q, LENGTHS_Q), (k, LENGTHS_K), (v, LENGTHS_K)))
    results = [
        attention_math(q[None], k[None, :used], v[None, :used], causal=causal)
        for q, k, v, used in zip(*parts, lengths_k, strict=True)
    ]
    outs, lses = zip(*results, strict=True)
    return torch.cat([x[0] for x in outs]), torch.cat([x[0] for x in lses], dim=1)


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_attn_of_torch(causal, on_cpu):
    from torch.nn.attention.varlen import varlen_attn

    inputs = Case(sum(LENGTHS_Q), sum(LENGTHS_K), 8, batch=1).inputs(torch.float64)
    q, k, v, dout = (x[0] for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    qkv = [x.requires_grad_() for x in (q, k, v)]
    window = {"window_size": (-1, 0)} if causal else {}
    out = varlen_attn(*qkv, offsets(LENGTHS_Q), offsets(LENGTHS_K), 7, 7, **window)
    right, _ = by_sequence(*qkv, causal)
    torch.testing.assert_close(out, right)
    for x, y in zip(*(torch.autograd.grad(o, qkv, dout) for o in (out, right)), strict=True):
        torch.testing.assert_close(x, y)


def test_used_lengths_reach_the_varlen_operator():
    inputs = Case(sum(LENGTHS_Q), sum(LENGTHS_K), 8, batch=1).inputs(torch.float32)
    qkv = [x[0] for x in (inputs.q, inputs.k, inputs.v)]
    used = (2, 4, 5, 1)
    where = offsets(LENGTHS_Q), offsets(LENGTHS_K), 7, 7
    seqused_k = torch.tensor(used, dtype=torch.int32)
    out, lse, *_ = sdpa._flash_forward(*qkv, *where, 0.0, False, False, seqused_k=seqused_k)
    torch.testing.assert_close((out, lse), by_sequence(*qkv, False, used))


# What is refused


def forward_args(**changes):
    inputs = CASES[0].inputs(torch.float32)
    arguments = {
        "query": inputs.q, "key": inputs.k, "value": inputs.v, "cum_seq_q": None, "cum_seq_k": None,
        "max_q": 9, "max_k": 9, "dropout_p": 0.0, "is_causal": False, "return_debug_mask": False,
    }  # fmt: skip
    return arguments | changes


@pytest.mark.parametrize(
    "argument, value",
    [
        ("dropout_p", 0.1),
        ("return_debug_mask", True),
        ("alibi_slopes", torch.ones(4)),
        ("block_table", torch.zeros(2, 1, dtype=torch.int32)),
        ("seqused_k", torch.ones(2, dtype=torch.int32)),
        ("cum_seq_k", torch.zeros(3, dtype=torch.int32)),
        ("num_splits", 2),
        ("an_argument_of_the_future", 1),
    ],
)
def test_what_flash3_does_not_do_raises(argument, value):
    sdpa._flash_forward(**forward_args(num_splits=1))
    with pytest.raises(NotImplementedError, match=f"^{argument}: .*must be"):
        sdpa._flash_forward(**forward_args(**{argument: value}))


@pytest.mark.parametrize("window", [(3, 0), (-1, 2), (0, None)])
def test_sliding_windows_raise(window):
    left, right = window
    with pytest.raises(NotImplementedError, match=r"window_size: .* is not supported yet"):
        sdpa._flash_forward(**forward_args(window_size_left=left, window_size_right=right))


def test_offsets_of_the_queries_alone_raise():
    cu = offsets([9])
    q = torch.zeros(9, 2, 8)
    with pytest.raises(ValueError, match="cum_seq_k: must be a tensor"):
        sdpa._flash_forward(**forward_args(query=q, key=q, value=q, cum_seq_q=cu))


# Context parallelism


def attention_on_two_ranks(rank, store):
    """One rank of a causal attention whose sequence is sharded by torch: its share of out and gradients is right."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    overrides = sdpa._Overrides("CPU")  # noqa: F841, they last as long as it does
    calls, real = [], sdpa.ops.fwd
    sdpa.ops.fwd = lambda *args: calls.append(args) or real(*args)
    inputs = Case(32, 32, 16, batch=1).inputs(torch.float32)
    whole = [x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    right = [x.detach() for x in (out, *torch.autograd.grad(out, leaves, whole[3]))]

    def scaled_dot_product_attention(q, k, v):
        """Calls what it would call on a GPU; on a CPU that is another operator. torch looks at the name."""
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

    F.scaled_dot_product_attention = scaled_dot_product_attention
    shards = [x.clone() for x in (*whole, *right)]
    mesh = init_device_mesh("cpu", (2,))
    with context_parallel(mesh, buffers=shards, buffer_seq_dims=[2] * len(shards)):
        q, k, v, dout, *right = (x.clone() for x in shards)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves)
        results = [out, *torch.autograd.grad(out, leaves, dout)]
    assert len(calls) == 2 and out.shape[2] == 16  # one call for each rank's keys
    for result, expected in zip(results, right, strict=True):
        torch.testing.assert_close(result, expected)
    dist.barrier()
    # At an orderly end gloo's threads abort the process now and then (seen with torch 2.11).
    os._exit(0)


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
def test_context_parallel_of_torch(tmp_path):
    torch.multiprocessing.spawn(attention_on_two_ranks, (str(tmp_path / "store"),), nprocs=2)
