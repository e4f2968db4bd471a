"""Legal but strange tensors: each function makes a (batch, seqlen, heads, head_dim) view of a fresh random tensor that
is not contiguous, or not aligned, and returns that tensor (a leaf, whose gradient is compared) and the view."""

from __future__ import annotations

import torch
from torch import Tensor


def _leaf(*shape: int, dtype, device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def heads_first(b, s, h, d, **kind):
    leaf = _leaf(b, h, s, d, **kind)
    return leaf, leaf.transpose(1, 2)


def sequence_first(b, s, h, d, **kind):
    leaf = _leaf(s, b, h, d, **kind)
    return leaf, leaf.transpose(0, 1)


def head_dim_not_last(b, s, h, d, **kind):
    leaf = _leaf(b, d, s, h, **kind)
    return leaf, leaf.permute(0, 2, 3, 1)


def every_second_element(b, s, h, d, **kind):
    leaf = _leaf(b, s, h, 2 * d, **kind)
    return leaf, leaf[..., ::2]


def one_element_off(b, s, h, d, **kind):
    """Address and strides that are not multiples of 16 bytes."""
    leaf = _leaf(b, s, h, d + 1, **kind)
    return leaf, leaf[..., 1:]


def address_off(b, s, h, d, **kind):
    """Contiguous, but at an address that is not a multiple of 16 bytes."""
    leaf = _leaf(b * s * h * d + 1, **kind)
    return leaf, leaf[1:].view(b, s, h, d)


def packed_slice(b, s, h, d, **kind):
    leaf = _leaf(b, s, 3, h, d, **kind)
    return leaf, leaf[:, :, 1]


def row_slice(b, s, h, d, **kind):
    leaf = _leaf(b, s + 9, h, d, **kind)
    return leaf, leaf[:, 4 : 4 + s]


def head_slice(b, s, h, d, **kind):
    leaf = _leaf(b, s, 2 * h, d, **kind)
    return leaf, leaf[:, :, ::2]


def expanded_batch(b, s, h, d, **kind):
    leaf = _leaf(1, s, h, d, **kind)
    return leaf, leaf.expand(b, s, h, d)


def expanded_heads(b, s, h, d, **kind):
    leaf = _leaf(b, s, 1, d, **kind)
    return leaf, leaf.expand(b, s, h, d)


def expanded_everywhere(b, s, h, d, **kind):
    leaf = _leaf(1, **kind)
    return leaf, leaf.expand(b, s, h, d)


VIEWS = [
    heads_first,
    sequence_first,
    head_dim_not_last,
    every_second_element,
    one_element_off,
    address_off,
    packed_slice,
    row_slice,
    head_slice,
    expanded_batch,
    expanded_heads,
    expanded_everywhere,
]


def inside(x: Tensor, filler: float, margin: int = 3) -> Tensor:
    """x as a slice of a larger tensor that is `filler` everywhere else: around it, and between rows and heads."""
    b, s, h, d = x.shape
    room = x.new_full((b + 2, s + 2 * margin, h + 2, d + 8), filler)
    room[1 : b + 1, margin : margin + s, 1 : h + 1, :d] = x
    return room[1 : b + 1, margin : margin + s, 1 : h + 1, :d]
