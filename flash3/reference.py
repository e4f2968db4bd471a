"""Attention as the kernels compute it, in plain PyTorch: the specification that the tests and the docs cite.

The forward is the online softmax of FlashAttention (Dao et al., 2022, algorithm 1; FlashAttention-3, Shah et al.,
2024, section 2.2): one pass over blocks of keys that keeps, for every query row, the maximum and the sum of the
exponentials seen so far. The backward (FlashAttention-2, Dao, 2023, algorithm 2) recomputes the probabilities from the
log-sum-exp and never stores a score matrix. :mod:`flash3.mask` says which keys a query sees.

Arithmetic is in float32, or float64 for float64 inputs. These functions serve CPU tensors in ``torch.ops.flash3``.

Letters: b batch, m queries of a block, n keys of a block, h key/value heads, g query heads of one key/value head,
d head_dim of q and k, dv of v. Tensors are (batch, seqlen, heads, head_dim).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flash3.mask import Mask

TILE_M = 128  # queries of a block
TILE_N = 128  # keys of a block


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of the arithmetic and of lse: float64 for float64 inputs, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    sink: Tensor | None = None,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    *,
    tile_m: int = TILE_M,
    tile_n: int = TILE_N,
) -> tuple[Tensor, Tensor]:
    """Attention output and log-sum-exp of the scaled scores.

    Args:
        q: (b, sq, hq, d) of any floating dtype.
        k, v: (b, sk, hk, d) and (b, sk, hk, dv), hq a multiple of hk; query head i attends key/value head
            i // (hq / hk).
        softmax_scale: factor of q.k before the softmax.
        causal: query i sees key j if j <= i + sk - sq (bottom-right aligned).
        sink: (hq), one more logit of each row of a query head: it takes its part of the softmax, is in lse, and adds
            no value. Neither scaled nor capped.
        window_left, window_right, attention_chunk: as in :mod:`flash3.mask`; -1 and 0 mean none.
        softcap: c > 0 turns a scaled score s into c * tanh(s / c), before the mask; 0 leaves it.

    Returns:
        out: (b, sq, hq, dv), contiguous, q's dtype; 0 in a row that sees no key.
        lse: (b, hq, sq), natural log, dtype of ``accumulate_dtype``; in a row that sees no key the sink, or -inf.
    """
    batch, seqlen_q, num_heads_q, _ = q.shape
    seqlen_k, head_dim_v = k.shape[1], v.shape[3]
    q_grouped = _group_heads(q, k.shape[2])
    k, v = _upcast(k), _upcast(v)
    out = q_grouped.new_empty((*q_grouped.shape[:4], head_dim_v))  # (b, sq, h, g, dv)
    lse = q_grouped.new_empty((batch, *q_grouped.shape[2:4], seqlen_q))  # (b, h, g, sq)
    mask = Mask.of_call((seqlen_q, seqlen_k), causal, window_left, window_right, attention_chunk)
    if sink is not None:
        sink = sink.to(lse.dtype).view(*lse.shape[1:3], 1)  # (h, g, 1)

    for rows in _blocks(slice(0, seqlen_q), tile_m):
        q_block = q_grouped[:, rows]
        row_max = lse.new_full(lse[..., rows].shape, -math.inf)  # (b, h, g, m)
        row_sum = torch.zeros_like(row_max)
        acc = lse.new_zeros((*row_max.shape, head_dim_v))
        for keys in _blocks(mask.keys(rows), tile_n):
            scores, _ = _scores(q_block, k[:, keys], softmax_scale, softcap)
            mask.hide(scores, rows, keys)
            new_max = torch.maximum(row_max, scores.amax(-1))
            shift = _finite(new_max)
            probs = torch.exp(scores - shift.unsqueeze(-1))
            rescale = torch.exp(row_max - shift)
            row_sum = row_sum * rescale + probs.sum(-1)
            acc = acc * rescale.unsqueeze(-1) + torch.einsum("bhgmn,bnhd->bhgmd", probs, v[:, keys])
            row_max = new_max
        if sink is not None:  # a key more, whose score is the sink and whose value is 0
            new_max = torch.maximum(row_max, sink)
            shift = _finite(new_max)
            rescale = torch.exp(row_max - shift)
            row_sum = row_sum * rescale + torch.exp(sink - shift)
            acc = acc * rescale.unsqueeze(-1)
            row_max = new_max
        no_key = row_sum == 0
        out_block = acc / row_sum.masked_fill(no_key, 1.0).unsqueeze(-1)
        out[:, rows] = out_block.permute(0, 3, 1, 2, 4)
        lse[..., rows] = row_max + torch.log(row_sum)

    return _ungroup_heads(out, q.dtype), lse.reshape(batch, num_heads_q, seqlen_q)


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    *,
    tile_m: int = TILE_M,
    tile_n: int = TILE_N,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`attention_forward` from its outputs. A sink needs nothing here: lse holds it.

    With P = exp(scale * QK^T - lse) and dP = dO V^T, the gradient of a score is dS = P * (dP - dPsum) where
    dPsum = rowsum(dO * O) - dlse, since d lse / d score = P. Then dQ = scale * dS K, dK = scale * dS^T Q, dV = P^T dO.
    A capped score has the slope 1 - tanh^2 in it, which goes to dS.

    Args:
        dout, out: (b, sq, hq, dv). lse: (b, hq, sq). dlse: the same shape, or None if nothing reached lse.
        others: as in the forward.

    Returns:
        dq, dk, dv: contiguous, shapes and dtypes of q, k, v. A row that sees no key contributes nothing.
    """
    seqlen_q, seqlen_k, num_heads_kv = q.shape[1], k.shape[1], k.shape[2]
    q_grouped, dout, out = (_group_heads(x, num_heads_kv) for x in (q, dout, out))
    k_up, v_up = _upcast(k), _upcast(v)

    dp_sum = (dout * out).sum(-1).permute(0, 2, 3, 1)  # (b, h, g, sq)
    lse = lse.reshape(dp_sum.shape)
    if dlse is not None:
        dp_sum = dp_sum - dlse.reshape(dp_sum.shape)
    # A row with no key: lse = +inf makes its P exactly 0, and whatever gradient its lse got must not make 0 * NaN.
    no_key = lse == -math.inf
    lse = lse.masked_fill(no_key, math.inf)
    dp_sum = dp_sum.masked_fill(no_key, 0.0)

    mask = Mask.of_call((seqlen_q, seqlen_k), causal, window_left, window_right, attention_chunk)
    dq, dk, dv = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_grouped, k_up, v_up)
    )
    for rows in _blocks(slice(0, seqlen_q), tile_m):
        q_block, dout_block = q_grouped[:, rows], dout[:, rows]
        for keys in _blocks(mask.keys(rows), tile_n):
            k_block, v_block = k_up[:, keys], v_up[:, keys]
            scores, slope = _scores(q_block, k_block, softmax_scale, softcap)
            mask.hide(scores, rows, keys)
            probs = torch.exp(scores - lse[..., rows].unsqueeze(-1))
            dv[:, keys] += torch.einsum("bhgmn,bmhgd->bnhd", probs, dout_block)
            dp = torch.einsum("bmhgd,bnhd->bhgmn", dout_block, v_block)
            ds = probs * (dp - dp_sum[..., rows].unsqueeze(-1)) * (slope * softmax_scale)
            dq[:, rows] += torch.einsum("bhgmn,bnhd->bmhgd", ds, k_block)
            dk[:, keys] += torch.einsum("bhgmn,bmhgd->bnhd", ds, q_block)

    return _ungroup_heads(dq, q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def sink_backward(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, sink: Tensor
) -> Tensor:
    """Gradient of the sink of :func:`attention_forward`, or of its packed form, from the outputs.

    The sink's own probability in a row is exp(sink - lse) and its value is 0, so its dP is 0: dsink is the sum of
    -exp(sink - lse) * dPsum over the rows of the head, dPsum as in :func:`attention_backward`.

    Args:
        dout, out: (b, sq, hq, dv), or packed (total_q, hq, dv). lse, dlse: (b, hq, sq) or (hq, total_q); dlse or None.
        sink: (hq). A row whose lse is -inf is none of the call's (packed, and used by no sequence) or has a sink of
            -inf: it counts nothing, whatever its dout and dlse hold.

    Returns:
        dsink: (hq), dtype of sink.
    """
    dp_sum = (_upcast(dout) * _upcast(out)).sum(-1).transpose(-1, -2)  # (..., hq, rows)
    if dlse is not None:
        dp_sum = dp_sum - dlse
    probs = torch.exp(sink.to(lse.dtype).unsqueeze(-1) - lse)
    dsink = -(probs * dp_sum).masked_fill(lse == -math.inf, 0.0)
    return dsink.sum([dim for dim in range(dsink.dim()) if dim != dsink.dim() - 2]).to(sink.dtype)


def merge(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys together, from the attention of the same queries to each.

    Exact: out is the mean of the parts, weighted by the sums exp(lse) of their exponentials.

    Args:
        out_1, out_2: (b, sq, hq, d). lse_1, lse_2: (b, hq, sq), -inf in a row that sees no key of that set.

    Returns:
        out, lse: of the same shapes, in the accumulation dtype.
    """
    lse = torch.logaddexp(lse_1, lse_2)
    shift = lse.masked_fill(lse == -math.inf, 0.0)
    weights = (torch.exp(part - shift).transpose(1, 2).unsqueeze(-1) for part in (lse_1, lse_2))
    return sum(w * _upcast(x) for w, x in zip(weights, (out_1, out_2), strict=True)), lse


def _upcast(x: Tensor) -> Tensor:
    return x.to(accumulate_dtype(x.dtype))


def _group_heads(x: Tensor, num_heads_kv: int) -> Tensor:
    """(b, s, hq, d) -> (b, s, h, g, d) in the accumulation dtype."""
    return _upcast(x).unflatten(2, (num_heads_kv, x.shape[2] // num_heads_kv))


def _ungroup_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.flatten(2, 3).to(dtype)


def _blocks(span: slice, tile: int) -> Iterator[slice]:
    for start in range(span.start, span.stop, tile):
        yield slice(start, min(start + tile, span.stop))


def _finite(row_max: Tensor) -> Tensor:
    """What to subtract from scores: a row without a key keeps -inf, where 0 gives exp(-inf) = 0 and not NaN."""
    return row_max.masked_fill(row_max == -math.inf, 0.0)


def _scores(
    q_block: Tensor, k_block: Tensor, softmax_scale: float, softcap: float
) -> tuple[Tensor, Tensor | float]:
    """Scores (b, h, g, m, n) without a mask, and their derivative by the scaled product of q and k."""
    scores = torch.einsum("bmhgd,bnhd->bhgmn", q_block, k_block) * softmax_scale
    if softcap == 0:
        return scores, 1.0
    capped = torch.tanh(scores / softcap)
    return softcap * capped, 1.0 - capped.square()
