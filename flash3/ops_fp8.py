"""The float8 operators of ``torch.ops.flash3``, in the manner of :mod:`flash3.ops`, which imports this module.

``fp8_attention`` is the two others together, from and to 16-bit tensors. It is the one that has a gradient
(:mod:`flash3.autograd_fp8`), and so one operator where it is traced.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash3 import reference_fp8
from flash3.reference_fp8 import BLOCK, E4M3, HEAD, KEY_TILE

# Block sizes say what the descales are for: row i of a head has that of block i / q_block. promote_every: P V is summed
# in the tensor cores' accumulators, whose sums are short, and added up in float32 every so many key steps; 0 is never.
torch.library.define(
    "flash3::fp8_fwd",
    "(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,"
    " int q_block, int k_block, int v_block, float softmax_scale, float v_scale, bool causal, bool v_transposed,"
    " ScalarType? out_dtype=None, int promote_every=0) -> (Tensor out, Tensor lse)",
)
# granularity: BLOCK, HEAD or TENSOR of reference_fp8. Without Hadamard transform seed has no effect.
torch.library.define(
    "flash3::quantize_qkv",
    "(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, bool interleaved, int granularity, int block,"
    " bool hadamard, int seed, bool transpose_v)"
    " -> (Tensor q8, Tensor k8, Tensor v8, Tensor q_descale, Tensor k_descale, Tensor v_descale)",
)
# `deterministic` and `recompute` ride along for the gradient formula.
torch.library.define(
    "flash3::fp8_attention",
    "(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, bool deterministic, int block, bool hadamard,"
    " int seed, int promote_every, bool recompute) -> (Tensor out, Tensor lse)",
)

NAMES = ("fp8_fwd", "quantize_qkv")  # what flash3._C implements
fp8_fwd = torch.ops.flash3.fp8_fwd.default
quantize_qkv = torch.ops.flash3.quantize_qkv.default
fp8_attention = torch.ops.flash3.fp8_attention.default


@torch.library.impl("flash3::fp8_fwd", "cpu")
def _fp8_fwd_cpu(
    q, k, v, q_descale, k_descale, v_descale, q_block, k_block, v_block, softmax_scale, v_scale, causal, v_transposed,
    out_dtype=None, promote_every=0,
):  # fmt: skip
    # Everything is summed in float32 here: there is nothing to promote.
    return reference_fp8.fp8_forward(
        q, k, v, q_descale, k_descale, v_descale, q_block, k_block, v_block, softmax_scale, v_scale, causal,
        v_transposed, out_dtype or torch.bfloat16,
    )  # fmt: skip


@torch.library.register_fake("flash3::fp8_fwd")
def _fp8_fwd_fake(
    q, k, v, q_descale, k_descale, v_descale, q_block, k_block, v_block, softmax_scale, v_scale, causal, v_transposed,
    out_dtype=None, promote_every=0,
):  # fmt: skip
    batch, seqlen_q, num_heads_q, _ = q.shape
    out = q.new_empty(q.shape, dtype=out_dtype or torch.bfloat16)
    return out, q.new_empty((batch, num_heads_q, seqlen_q), dtype=torch.float32)


@torch.library.impl("flash3::quantize_qkv", "cpu")
def _quantize_qkv_cpu(
    q, k, v, cos, sin, interleaved, granularity, block, hadamard, seed, transpose_v
):
    seqlen_q, seqlen_k, num_heads_kv = q.shape[1], k.shape[1], k.shape[2]
    signs = seed if hadamard else None

    def quantize(x: Tensor, first_row: int) -> tuple[Tensor, Tensor]:
        rows = slice(first_row, first_row + x.shape[1])
        tables = None if cos is None else (cos[rows], sin[rows])
        return reference_fp8.quantize(
            x, num_heads_kv, granularity, block, tables, interleaved, signs
        )

    q8, q_descale = quantize(q, seqlen_k - seqlen_q if cos is not None else 0)
    k8, k_descale = quantize(k, 0)
    v8, v_descale = reference_fp8.quantize(v, num_heads_kv, granularity, block)
    if transpose_v:
        v8 = reference_fp8.transpose_values(v8)
    return q8.contiguous(), k8.contiguous(), v8.contiguous(), q_descale, k_descale, v_descale


@torch.library.register_fake("flash3::quantize_qkv")
def _quantize_qkv_fake(
    q, k, v, cos, sin, interleaved, granularity, block, hadamard, seed, transpose_v
):
    batch, seqlen_k, num_heads_kv, head_dim = v.shape

    def descale(x: Tensor) -> Tensor:
        if granularity == BLOCK:
            shape = (batch, x.shape[2], -(-x.shape[1] // block))
        else:
            shape = (batch, num_heads_kv) if granularity == HEAD else (1,)
        return x.new_empty(shape, dtype=torch.float32)

    v_shape = v.shape
    if transpose_v:
        v_shape = (batch, num_heads_kv, head_dim, -(-seqlen_k // KEY_TILE) * KEY_TILE)
    tensors = (
        x.new_empty(shape, dtype=E4M3) for x, shape in ((q, q.shape), (k, k.shape), (v, v_shape))
    )
    return (*tensors, *(descale(x) for x in (q, k, v)))


def _fp8_attention(
    q, k, v, softmax_scale, causal, deterministic, block, hadamard, seed, promote_every, recompute
):
    # Values go to the transposed layout: nobody else reads them, and it saves the kernel the transposition.
    q8, k8, v8, *descales = quantize_qkv(
        q, k, v, None, None, False, BLOCK, block, hadamard, seed, True
    )
    return fp8_fwd(
        q8, k8, v8, *descales, block, block, block, softmax_scale, 1.0, causal, True, q.dtype, promote_every
    )  # fmt: skip


torch.library.impl("flash3::fp8_attention", "cpu")(_fp8_attention)
torch.library.impl("flash3::fp8_attention", "cuda")(_fp8_attention)


@torch.library.register_fake("flash3::fp8_attention")
def _fp8_attention_fake(q, k, v, *rest):
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return q.new_empty(q.shape), lse
