"""Argument checks of the float8 functions, in the manner of :mod:`flash3.checks`."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from flash3 import checks, checks_options
from flash3.reference_fp8 import BLOCK, E4M3, HEAD, TENSOR

TWO_LEVEL_HEAD_DIM = 128  # above there are no registers for a second accumulator

HEAD_DIM_STEP = 16
BLOCKS = (64, 128)
GRANULARITIES = {"block": BLOCK, "head": HEAD, "tensor": TENSOR}
OUT_DTYPES = (torch.bfloat16, torch.float16)
_NAMES = ("q", "k", "v")


def check_16_bit(q: Tensor, k: Tensor, v: Tensor, hadamard: bool) -> int:
    """Raises unless these can be quantised; returns head_dim."""
    checks.check_kind(q, k, v)
    if q.dtype not in OUT_DTYPES:
        raise TypeError(
            f"q, k, v: must be float16 or bfloat16 to be quantised, got {q.dtype}; float8_e4m3fn tensors go to "
            "flash_attn_func"
        )
    check_flag("hadamard", hadamard)
    return _check_shapes(q, k, v, hadamard)


def check_e4m3(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Raises unless these are e4m3 tensors that flash3 computes with; returns head_dim."""
    for name, x in zip(_NAMES, (q, k, v), strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: must be a torch.Tensor, got {type(x).__name__}")
        if x.layout is not torch.strided:
            raise TypeError(f"{name}: must be a dense tensor, got layout {x.layout}")
        if x.dtype is not E4M3:
            raise TypeError(
                f"{name}: must be float8_e4m3fn where one of q, k and v is, got {x.dtype}"
            )
        if x.device != q.device:
            raise ValueError(f"{name}: must be on q's device {q.device}, got {x.device}")
    checks.accepted_dtypes(q.device)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise NotImplementedError(
            "q, k, v: float8_e4m3fn inputs have no gradient; flash_attn_fp8_func quantises 16-bit inputs itself and has"
        )
    return _check_shapes(q, k, v, False)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, hadamard: bool) -> int:
    for name, x in zip(_NAMES, (q, k, v), strict=True):
        if x.dim() != 4:
            raise ValueError(
                f"{name}: must be (batch, seqlen, heads, head_dim), got shape {tuple(x.shape)}"
            )
    batch, _, num_heads_q, head_dim = q.shape
    if head_dim % HEAD_DIM_STEP or not HEAD_DIM_STEP <= head_dim <= checks.MAX_HEAD_DIM:
        why = ", which the Hadamard transform needs as well" if hadamard else ""
        raise ValueError(
            f"q: head_dim must be a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to {checks.MAX_HEAD_DIM} in "
            f"float8{why}, got {head_dim}"
        )
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"k: must have q's batch {batch} and head_dim {head_dim}, got shape {tuple(k.shape)}"
        )
    checks.check_heads(num_heads_q, k.shape[2])
    if v.shape != k.shape:
        raise ValueError(f"v: must have k's shape {tuple(k.shape)} in float8, got {tuple(v.shape)}")
    return head_dim


def check_options(
    attention_chunk: int,
    softcap: float,
    learnable_sink: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    batch_invariant: bool,
) -> None:
    """Raises for what attention of e4m3 tensors does not have. It is batch invariant as it is."""
    check_flag("batch_invariant", batch_invariant)
    if attention_chunk != 0 or softcap != 0:
        name, value = (
            ("attention_chunk", attention_chunk) if attention_chunk != 0 else ("softcap", softcap)
        )
        raise NotImplementedError(
            f"{name}: {value!r} is not supported for float8_e4m3fn inputs, must be 0"
        )
    names = "learnable_sink", "seqused_q", "seqused_k"
    for name, given in zip(names, (learnable_sink, seqused_q, seqused_k), strict=True):
        if given is not None:
            raise NotImplementedError(
                f"{name}: not supported for float8_e4m3fn inputs, must be None"
            )


def is_causal(causal: bool, window_size: tuple[int, int]) -> bool:
    """Whether ``causal`` and ``window_size`` together are the causal mask; other windows are not supported."""
    left, right = checks_options.check_window(window_size)
    if left != -1 or right not in (-1, 0):
        raise NotImplementedError(
            f"window_size: {tuple(window_size)} is not supported for float8_e4m3fn inputs; (-1, -1) and (-1, 0), which "
            "is causal, are"
        )
    return causal or right == 0


def check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: must be True or False, got {value!r}")


def check_integer(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: must be an int, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name}: must be from {low} to {high}, got {value}")


def check_seed(seed: int) -> None:
    check_integer("seed", seed, -(2**63), 2**63 - 1)


def check_promote_every(steps: int, head_dim: int) -> None:
    check_integer("promote_every", steps, 0, 1)
    if steps and head_dim > TWO_LEVEL_HEAD_DIM:
        raise NotImplementedError(
            f"promote_every: must be 0 for head_dim above {TWO_LEVEL_HEAD_DIM}, got {steps} for head_dim {head_dim}"
        )


def check_block(block: int) -> None:
    if not isinstance(block, int) or isinstance(block, bool):
        raise TypeError(f"block: must be an int, got {block!r}")
    if block not in BLOCKS:
        raise ValueError(f"block: must be 64 or 128, got {block}")


def granularity_code(granularity: str) -> int:
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity: must be 'block', 'head' or 'tensor', got {granularity!r}")
    return GRANULARITIES[granularity]


def check_out_dtype(out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is None:
        return torch.bfloat16
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype: must be None, bfloat16 or float16, got {out_dtype!r}")
    return out_dtype


def check_tables(cos: Tensor | None, sin: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Raises unless cos and sin are both None, or rotary tables for q and k."""
    if cos is None and sin is None:
        return
    for name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, Tensor):
            raise TypeError(
                f"{name}: must be a torch.Tensor where cos or sin is given, got {type(table).__name__}"
            )
        if table.dtype not in (torch.float32, q.dtype):
            raise TypeError(f"{name}: must be float32 or {q.dtype}, as q is, got {table.dtype}")
        if table.device != q.device:
            raise ValueError(f"{name}: must be on q's device {q.device}, got {table.device}")
        if table.dim() != 2 or table.shape[0] < k.shape[1]:
            raise ValueError(
                f"{name}: must be (positions, rotary_dim / 2) with at least k's {k.shape[1]} positions, got shape "
                f"{tuple(table.shape)}"
            )
    half, head_dim = cos.shape[1], q.shape[3]
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise ValueError(
            f"sin: must have cos's shape {tuple(cos.shape)} and dtype {cos.dtype}, got {tuple(sin.shape)} and "
            f"{sin.dtype}"
        )
    if half % 8 or not 8 <= half <= head_dim // 2:
        raise ValueError(
            f"cos: rotary_dim / 2 must be a multiple of 8 up to head_dim / 2, {head_dim // 2}, got {half}"
        )
    if q.shape[1] > k.shape[1]:
        raise ValueError(
            "q: must have at most as many rows as k with rotary tables, since its last row has the position of k's "
            f"last, got {q.shape[1]} and {k.shape[1]}"
        )


def number(name: str, value: float) -> float:
    """A descale that is a Python number; raises unless it is finite, positive and a normal float32."""
    if isinstance(value, bool) or not isinstance(value, (float, int)):
        raise TypeError(
            f"{name}: must be None, a number or a float32 tensor, got {type(value).__name__}"
        )
    if not checks.MIN_SCALE <= value <= checks.MAX_SCALE:
        raise ValueError(f"{name}: must be positive, finite and a normal float32, got {value}")
    return float(value)


def check_scale_tensor(name: str, scale: Tensor, like: Tensor) -> None:
    if not isinstance(scale, Tensor):
        raise TypeError(f"{name}: must be a float32 tensor, got {type(scale).__name__}")
    if scale.dtype is not torch.float32:
        raise TypeError(f"{name}: must be float32, got {scale.dtype}")
    if scale.device != like.device:
        raise ValueError(f"{name}: must be on q's device {like.device}, got {scale.device}")
    if torch.is_grad_enabled() and scale.requires_grad:
        raise NotImplementedError(f"{name}: has no gradient, detach it")


def block_of(name: str, scale: Tensor, like: Tensor) -> int:
    """The block size that the shape of ``scale``, one number per block of rows of ``like``, states."""
    check_scale_tensor(name, scale, like)
    batch, seqlen, heads, _ = like.shape
    counts = {block: -(-seqlen // block) for block in reversed(BLOCKS)}
    for block, count in counts.items():
        if scale.shape == (batch, heads, count):
            return block
    raise ValueError(
        f"{name}: must be (batch, heads, blocks) = ({batch}, {heads}, {counts[128]}) for blocks of 128 rows or "
        f"({batch}, {heads}, {counts[64]}) for 64, got shape {tuple(scale.shape)}"
    )


def raise_scale_shape(name: str, shape: torch.Size, batch: int, num_heads_kv: int) -> NoReturn:
    raise ValueError(
        f"{name}: must be a number or of shape (1,) or (batch, heads_kv) = ({batch}, {num_heads_kv}), got shape "
        f"{tuple(shape)}"
    )


def check_total_scale(name: str, value: float) -> float:
    if not (checks.MIN_SCALE <= value <= checks.MAX_SCALE and math.isfinite(value)):
        raise ValueError(f"{name}: must be a normal float32 together, got {value}")
    return value
