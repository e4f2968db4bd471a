"""Argument checks of ``flash_attn_varlen_func``, in the manner of :mod:`flash3.checks`.

What cu_seqlens and seqused hold is known to the device alone; to look is to wait for it, so that is done only with
FLASH3_DEBUG=1 in the environment.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from flash3 import checks

MAX_ROWS = 2**30  # of a packed tensor, as the kernels address it


def check_call(q: Tensor, k: Tensor, v: Tensor, sequences: tuple, longest: tuple) -> int:
    """Raises unless flash3 computes the call; returns head_dim.

    Args:
        sequences: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k.
        longest: max_seqlen_q, max_seqlen_k.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as ``flash3.checks.check_tensors``.
    """
    head_dim = check_packed_tensors(q, k, v)
    check_sequences(q.device, sequences, longest)
    if checks.DEBUG and not torch.compiler.is_compiling():
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = sequences
        _check_side("q", q.shape[0], cu_seqlens_q, longest[0], seqused_q)
        _check_side("k", k.shape[0], cu_seqlens_k, longest[1], seqused_k)
    return head_dim


def check_packed_tensors(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Raises unless q (total_q, hq, d), k and v (total_k, hk, d) are something that flash3 computes; returns d."""
    checks.check_kind(q, k, v)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    for name, shape in (("q", q_shape), ("k", k_shape), ("v", v_shape)):
        if len(shape) != 3:
            raise ValueError(f"{name}: must be (rows, heads, head_dim), got shape {tuple(shape)}")
    total_q, num_heads_q, head_dim = q_shape
    total_k, num_heads_kv, head_dim_k = k_shape
    checks.check_head_dim(head_dim)
    if head_dim_k != head_dim:
        raise ValueError(f"k: must have q's head_dim {head_dim}, got shape {tuple(k_shape)}")
    checks.check_heads(num_heads_q, num_heads_kv)
    if v_shape != k_shape:
        checks.check_v_shape(v_shape, k_shape)
    if total_q > MAX_ROWS or total_k > MAX_ROWS:
        raise ValueError(f"q, k, v: must have at most 2^30 rows, got {total_q} and {total_k}")
    return head_dim


def check_sequences(device: torch.device, sequences: tuple, longest: tuple) -> None:
    """The same for where the sequences lie: kind, dtype, device and shape. ``device`` is q's."""
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = sequences
    _check_lengths("cu_seqlens_q", cu_seqlens_q, device, None)
    count = cu_seqlens_q.shape[0]
    if count == 0:
        raise ValueError("cu_seqlens_q: must hold batch + 1 numbers, at least one, got none")
    _check_lengths("cu_seqlens_k", cu_seqlens_k, device, count)
    if seqused_q is not None:
        _check_lengths("seqused_q", seqused_q, device, count - 1)
    if seqused_k is not None:
        _check_lengths("seqused_k", seqused_k, device, count - 1)
    _check_max_seqlen("max_seqlen_q", longest[0])
    _check_max_seqlen("max_seqlen_k", longest[1])


def _check_side(
    side: str, total: int, cu_seqlens: Tensor, max_seqlen: int | Tensor, seqused: Tensor | None
) -> None:
    """The numbers themselves. Waits for the device."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0:
        raise ValueError(f"cu_seqlens_{side}: must start with 0, got {ends[0]}")
    slots = [end - start for start, end in itertools.pairwise(ends)]
    for b, slot in enumerate(slots):
        if slot < 0:
            raise ValueError(
                f"cu_seqlens_{side}: must never fall, got {ends[b]} at index {b} and {ends[b + 1]} at index {b + 1}"
            )
    if ends[-1] > total:
        raise ValueError(
            f"cu_seqlens_{side}: must end with at most the {total} rows of {side}, got {ends[-1]} at index "
            f"{len(ends) - 1}"
        )
    lengths = slots if seqused is None else seqused.tolist()
    for b, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        if not 0 <= length <= slot:
            raise ValueError(
                f"seqused_{side}: must be from 0 to the length of its slot, {slot}, got {length} at index {b}"
            )
        if length > int(max_seqlen):
            raise ValueError(
                f"max_seqlen_{side}: must be at least every length, got {int(max_seqlen)}, sequence {b} has {length}"
            )


def _check_lengths(name: str, x: Tensor, device: torch.device, count: int | None) -> None:
    """An int32 vector of ``count`` numbers, None for any."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype is not torch.int32:
        raise TypeError(f"{name}: dtype must be torch.int32, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name}: must be on q's device {device}, got {x.device}")
    if x.dim() != 1 or (count is not None and x.shape[0] != count):
        wanted = "(batch + 1,)" if count is None else f"({count},)"
        raise ValueError(f"{name}: must have shape {wanted}, got {tuple(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, got stride {x.stride()}")


def _check_max_seqlen(name: str, value: int | Tensor) -> None:
    """Any int that is not negative, or a tensor of one, which is not read: that would wait for the device."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dtype.is_floating_point or value.dtype is torch.bool:
            raise TypeError(
                f"{name}: must be an int or a tensor of one integer, got shape {tuple(value.shape)} of {value.dtype}"
            )
        return
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: must be an int or a tensor of one integer, got {value!r}")
    if value < 0:
        raise ValueError(f"{name}: must not be negative, got {value}")
