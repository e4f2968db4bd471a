"""A sequence alone and among others: dense batches that use a part of their rows, and batch_invariant=True."""

import math

import pytest
import torch
from score_cases import COMBINATIONS, mask_of, sink_of

import flash3

BF16 = torch.bfloat16
EVERYTHING = COMBINATIONS[-1]
ARGUMENTS = [{}, {"causal": True}, {"window_size": (150, 0)}, EVERYTHING]
arguments_of_calls = pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
head_dims = pytest.mark.parametrize("head_dim", [40, 64, 128, 192, 256])


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def normal(*shape):
    return torch.randn(shape, device="cuda").to(BF16)


@arguments_of_calls
@head_dims
def test_a_part_of_the_rows_is_the_packed_call(head_dim, arguments, flash3_rows):
    """Bitwise, with NaN in what is not used, and zeros in the results there."""
    flash3_rows(BF16, head_dim, mask_of(**{"causal": False, **arguments}), layout="packed")
    used_q, used_k = (300, 0, 129, 77), (200, 333, 0, 333)
    q, k, v, dout = (normal(4, s, h, head_dim) for s, h in ((300, 4), (333, 2), (333, 2), (300, 4)))
    sink = sink_of(4, torch.float32, "cuda").requires_grad_()
    arguments = {**arguments, "learnable_sink": sink, "deterministic": True, "return_lse": True}
    packed = [
        torch.cat([x[b, :n] for b, n in enumerate(lengths)]).requires_grad_()
        for x, lengths in ((q, used_q), (k, used_k), (v, used_k))
    ]
    ends = [int32(0, *torch.tensor(lengths).cumsum(0).tolist()) for lengths in (used_q, used_k)]
    right, right_lse = flash3.flash_attn_varlen_func(*packed, *ends, 300, 333, **arguments)
    right_dout = torch.cat([dout[b, :n] for b, n in enumerate(used_q)])
    right_grads = torch.autograd.grad(right, (*packed, sink), right_dout)

    for b in range(4):
        for x, lengths in ((q, used_q), (k, used_k), (v, used_k), (dout, used_q)):
            x[b, lengths[b] :] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash3.flash_attn_func(
        *leaves, seqused_q=int32(*used_q), seqused_k=int32(*used_k), **arguments
    )
    *grads, dsink = torch.autograd.grad(out, (*leaves, sink), dout)
    for x, y, lengths, unused in (
        (out, right, used_q, 0),
        (lse.transpose(1, 2), right_lse.T, used_q, -math.inf),
        (grads[0], right_grads[0], used_q, 0),
        (grads[1], right_grads[1], used_k, 0),
        (grads[2], right_grads[2], used_k, 0),
    ):
        assert torch.equal(torch.cat([x[b, :n] for b, n in enumerate(lengths)]), y)
        assert all((x[b, n:] == unused).all() for b, n in enumerate(lengths))
    torch.testing.assert_close(dsink, right_grads[3])


@arguments_of_calls
@head_dims
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)], ids=str)
def test_packed_rows_do_not_depend_on_the_batch(heads, head_dim, arguments, flash3_rows):
    """Each sequence alone, bitwise as among others, gradients too."""
    flash3_rows(BF16, head_dim, mask_of(**{"causal": False, **arguments}), layout="packed")
    flash3_rows(BF16, head_dim, bool(arguments.get("causal")), layout="packed")
    lengths = (700, 90, 3, 1500, 257, *[40] * 50)
    ends = torch.tensor((0, *lengths)).cumsum(0)
    q, k, v, dout = (
        normal(int(ends[-1]), h, head_dim) for h in (heads[0], heads[1], heads[1], heads[0])
    )
    sink = sink_of(heads[0], torch.float32, "cuda")
    arguments = {**arguments, "learnable_sink": sink, "batch_invariant": True, "return_lse": True}

    def run(rows, ends):
        leaves = [x[rows].clone().requires_grad_() for x in (q, k, v)]
        cu = int32(*ends)
        out, lse = flash3.flash_attn_varlen_func(*leaves, cu, cu, 1500, 1500, **arguments)
        grads = torch.autograd.grad(out, leaves, dout[rows])
        return out, lse.T, *grads

    together = run(slice(None), ends.tolist())
    for b in range(6):
        rows = slice(int(ends[b]), int(ends[b + 1]))
        for x, y in zip(run(rows, (0, lengths[b])), together, strict=True):
            assert torch.equal(x, y[rows]), b


@arguments_of_calls
@head_dims
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)], ids=str)
def test_dense_rows_do_not_depend_on_the_batch(heads, head_dim, arguments, flash3_rows):
    flash3_rows(BF16, head_dim, mask_of(**{"causal": False, **arguments}))
    shapes = ((500, heads[0]), (700, heads[1]), (700, heads[1]), (500, heads[0]))
    q, k, v, dout = (normal(60, s, h, head_dim) for s, h in shapes)
    sink = sink_of(heads[0], torch.float32, "cuda")
    arguments = {**arguments, "learnable_sink": sink, "batch_invariant": True, "return_lse": True}

    def run(entries):
        leaves = [x[entries].clone().requires_grad_() for x in (q, k, v)]
        out, lse = flash3.flash_attn_func(*leaves, **arguments)
        grads = torch.autograd.grad(out, leaves, dout[entries])
        return out, lse, *grads

    together = run(slice(None))
    for entries in (slice(1), slice(17, 18), slice(30, 39)):
        for x, y in zip(run(entries), together, strict=True):
            assert torch.equal(x, y[entries]), entries


def test_tiles_of_either_size_give_the_same_bits(flash3_rows):
    """At head_dim 64 the number of queries chooses between tiles of 192 and 128.

    Where scores outgrow those of earlier keys, the 16 queries of a warp move their references together, so that a
    query's last bits then depend on whether its neighbours are there (docs/numerics.md, online softmax).
    """
    flash3_rows(BF16, 64, False)
    q, k, v = normal(2, 576, 4, 64), normal(2, 700, 2, 64), normal(2, 700, 2, 64)
    out, lse = flash3.flash_attn_func(q, k, v, return_lse=True)
    for first in (64, 200, 256):
        part, part_lse = flash3.flash_attn_func(q[:, :first], k, v, return_lse=True)
        assert torch.equal(part, out[:, :first])
        assert torch.equal(part_lse, lse[..., :first])
