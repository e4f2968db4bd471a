"""Floating point operations of the operators, for ``torch.utils.flop_counter``:

    import flash3.flops
    from torch.utils.flop_counter import FlopCounterMode

    flash3.flops.register()
    with FlopCounterMode() as counter:
        loss(model(x)).backward()

Counted are the matrix products over the pairs of a query and a key that the mask lets through: two in the forward, five
in the backward, of which one computes the scores again. torch's own formulas count the pairs that a mask hides too.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flash3.mask import Mask


def register() -> None:
    """Makes the formulas known to every counter that is made from now on. Importing flash3 does not do it."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    if torch.ops.flash3.fwd in flop_registry:
        return
    for name, formula in (
        ("fwd", _forward),
        ("bwd", _backward),
        ("varlen_fwd", _varlen_forward),
        ("varlen_bwd", _varlen_backward),
    ):
        register_flop_formula(getattr(torch.ops.flash3, name), get_raw=True)(formula)


@functools.lru_cache(1 << 14)
def seen_pairs(
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    window_left: int = -1,
    window_right: int = -1,
    attention_chunk: int = 0,
) -> int:
    """How many pairs of a query and a key the mask lets through."""
    mask = Mask.of_call((seqlen_q, seqlen_k), causal, window_left, window_right, attention_chunk)
    if not causal and window_left == window_right == -1 and attention_chunk == 0:
        return seqlen_q * seqlen_k
    ranges = (mask.keys(slice(i, i + 1)) for i in range(seqlen_q))
    return sum(keys.stop - keys.start for keys in ranges)


def _forward(q, k, v, scale, causal, deterministic=False, sink=None, *scores, out_val=None):
    return q.shape[0] * q.shape[2] * _pairs((q, k), causal, scores) * 2 * _widths(q, v, 1, 1)


def _backward(dout, q, k, v, out, lse, dlse, scale, causal, deterministic, *scores, out_val=None):
    return q.shape[0] * q.shape[2] * _pairs((q, k), causal, scores) * 2 * _widths(q, v, 3, 2)


def _varlen_forward(
    q, k, v, cu_q, cu_k, used_q, used_k, scale, causal, deterministic=False, sink=None, *scores,
    out_val=None,
):  # fmt: skip
    pairs = _packed_pairs((q, cu_q, used_q), (k, cu_k, used_k), causal, scores)
    return q.shape[1] * pairs * 2 * _widths(q, v, 1, 1)


def _varlen_backward(
    dout, q, k, v, out, lse, dlse, cu_q, cu_k, used_q, used_k, scale, causal, deterministic,
    *scores, out_val=None,
):  # fmt: skip
    pairs = _packed_pairs((q, cu_q, used_q), (k, cu_k, used_k), causal, scores)
    return q.shape[1] * pairs * 2 * _widths(q, v, 3, 2)


def _widths(q: Tensor, v: Tensor, products: int, products_v: int) -> int:
    """Columns of all products together: some are as wide as q and k, some as v."""
    return products * q.shape[-1] + products_v * v.shape[-1]


def _pairs(tensors: tuple[Tensor, Tensor], causal: bool, scores: tuple) -> int:
    return seen_pairs(*(int(x.shape[1]) for x in tensors), causal, *scores[:3])


def _packed_pairs(queries: tuple, keys: tuple, causal: bool, scores: tuple) -> int:
    lengths = zip(_lengths(*queries), _lengths(*keys), strict=True)
    return sum(seen_pairs(*both, causal, *scores[:3]) for both in lengths)


def _lengths(x: Tensor, cu_seqlens: Tensor, seqused: Tensor | None) -> list[int]:
    """Of each sequence. Reads the device; where there is nothing to read, all are taken to be equally long."""
    if type(cu_seqlens) is not Tensor or cu_seqlens.device.type == "meta":
        batch = max(1, cu_seqlens.shape[0] - 1)
        return [x.shape[0] // batch] * batch
    return (cu_seqlens.diff() if seqused is None else seqused).tolist()
