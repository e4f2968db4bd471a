"""Argument checks of what is not a tensor of q's kind: scale, flags, windows, attention_chunk, softcap, sinks.

The defaults are those of FlashAttention-3. A call that keeps them pays for comparisons alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash3 import checks

NO_WINDOW = (-1, -1)

# No sequence is longer, so an edge of a window as far away as this hides nothing.
MAX_LENGTH = 2**31 - 1

SAME_IN_EVERY_BATCH = 2  # of the operators' `order`: flash3/ops.py


def check_options(
    tensors: tuple[Tensor, Tensor, Tensor],
    softmax_scale: float | None,
    causal: bool,
    deterministic: bool,
    batch_invariant: bool,
    window_size: tuple[int, int],
    attention_chunk: int,
    softcap: float,
    sink: Tensor | None,
) -> tuple:
    """The operators' arguments from ``softmax_scale`` on, none behind ``order`` if the call is a plain one.

    Args:
        tensors: q, k and v, checked already; their last dimensions are heads and head_dim.
        others: as the user gave them.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument that is wrong, named in the message.
    """
    q = tensors[0]
    checks.check_flags(causal, deterministic)
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant: must be True or False, got {batch_invariant!r}")
    order = SAME_IN_EVERY_BATCH if batch_invariant else int(deterministic)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else checks.check_scale(softmax_scale)
    scores = window_size, attention_chunk, softcap, sink
    if window_size is NO_WINDOW and attention_chunk == 0 and softcap == 0 and sink is None:
        return scale, causal, order
    causal, extras = check_extras(q, scale, causal, *scores)
    return scale, causal, order, *extras


def check_extras(
    q: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    attention_chunk: int,
    softcap: float,
    sink: Tensor | None,
) -> tuple[bool, tuple]:
    """``causal``, and the operators' arguments behind ``deterministic``: none if the call turns out to be a plain one.

    The right edge 0 is the causal mask's own, so a window of (-1, 0) is one; a causal mask hides what lies right of it.

    Raises:
        TypeError, ValueError: an argument that is wrong, named in the message.
    """
    left, right = check_window(window_size)
    attention_chunk = _check_chunk(attention_chunk)
    softcap = _check_softcap(softcap, softmax_scale)
    if sink is not None:
        sink = check_sink(sink, q)
    causal = causal or right == 0
    if causal:
        right = -1
    if sink is None and left == right == -1 and attention_chunk == 0 and softcap == 0:
        return causal, ()
    return causal, (sink, left, right, attention_chunk, softcap)


def check_window(window_size: tuple[int, int]) -> tuple[int, int]:
    if not (isinstance(window_size, (tuple, list)) and len(window_size) == 2):
        raise TypeError(f"window_size: must be a pair (left, right) of ints, got {window_size!r}")
    left, right = window_size
    if not (_is_int(left) and _is_int(right)):
        raise TypeError(f"window_size: must be a pair (left, right) of ints, got {window_size!r}")
    if left < -1 or right < -1:
        raise ValueError(
            "window_size: left and right must be -1, which is unbounded, or at least 0, got "
            f"{tuple(window_size)}"
        )
    return -1 if left >= MAX_LENGTH else left, -1 if right >= MAX_LENGTH else right


def check_sink(sink: Tensor, q: Tensor) -> Tensor:
    """A sink for each head of q, (..., heads, head_dim); returns it contiguous."""
    if not isinstance(sink, Tensor):
        raise TypeError(
            f"learnable_sink: must be None or a torch.Tensor, got {type(sink).__name__}"
        )
    if sink.layout is not torch.strided:
        raise TypeError(f"learnable_sink: must be a dense tensor, got layout {sink.layout}")
    if sink.dtype is not q.dtype and sink.dtype is not torch.float32:
        raise TypeError(
            f"learnable_sink: dtype must be q's {q.dtype} or torch.float32, got {sink.dtype}"
        )
    if sink.device != q.device:
        raise ValueError(f"learnable_sink: must be on q's device {q.device}, got {sink.device}")
    if sink.dim() != 1 or sink.shape[0] != q.shape[-2]:
        raise ValueError(
            f"learnable_sink: must have shape ({q.shape[-2]},), a logit for each head of q, got {tuple(sink.shape)}"
        )
    return sink.contiguous()


def _check_chunk(attention_chunk: int) -> int:
    if not _is_int(attention_chunk):
        raise TypeError(f"attention_chunk: must be an int, got {attention_chunk!r}")
    if attention_chunk < 0:
        raise ValueError(f"attention_chunk: must be positive, or 0 for none, got {attention_chunk}")
    return MAX_LENGTH if attention_chunk > MAX_LENGTH else attention_chunk


def _check_softcap(softcap: float, softmax_scale: float) -> float:
    """Kernels divide the scale by the cap, so the quotient has to be a normal number too."""
    if isinstance(softcap, bool) or not isinstance(softcap, (float, int)):
        raise TypeError(f"softcap: must be a float, got {softcap!r}")
    if softcap == 0:
        return 0.0
    if not checks.MIN_SCALE <= softcap <= checks.MAX_SCALE:  # false for NaN too
        raise ValueError(
            f"softcap: must be positive, finite and a normal float32, or 0 for none, got {softcap}"
        )
    if not checks.MIN_SCALE <= softmax_scale / softcap <= checks.MAX_SCALE:
        raise ValueError(
            f"softcap: softmax_scale / softcap must be a normal float32, got {softmax_scale} / {softcap}"
        )
    return float(softcap)


def _is_int(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
