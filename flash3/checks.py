"""Argument checks of the public functions, made before any launch.

One pass over plain attributes: together they cost about a microsecond, so they run on every call. Each message names
the argument, what it got and what is accepted.
"""

from __future__ import annotations

import functools
import os
from typing import NoReturn

import torch
from torch import Tensor

from flash3.ops import kernels_missing

# Checks that wait for the device: what tensors of lengths hold, whether ranks agree at every call.
DEBUG = os.environ.get("FLASH3_DEBUG", "0") not in ("", "0")

HOPPER = (
    9,
    0,
)  # compute capability; the kernels are compiled for sm_90a, which runs on nothing else
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8

# Bounds of a scale that stays a normal number in float32. Zero and below are out: the kernels scale the row maximum.
MIN_SCALE = torch.finfo(torch.float32).tiny
MAX_SCALE = torch.finfo(torch.float32).max

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
REFERENCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_available(device: torch.device | str | int | None = None) -> bool:
    """True if the CUDA kernels are built and ``device`` (None: the current CUDA device) is a Hopper GPU."""
    if kernels_missing is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) == HOPPER


def accepted_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes that flash3 computes on ``device``; raises for a device that it cannot run on."""
    return _query_accepted_dtypes(device)


# What torch.compiler.assume_constant_result sets. The decorator itself imports the whole compiler, which takes two
# seconds of every `import flash3`; tests/host/test_compile.py notices if torch should look for another mark.
accepted_dtypes._dynamo_marked_constant = True


@functools.cache  # a capability query costs more than all other checks together
def _query_accepted_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    if device.type == "cpu":
        return REFERENCE_DTYPES
    if device.type == "meta":
        return KERNEL_DTYPES
    if device.type != "cuda":
        raise NotImplementedError(
            f"q: device {device} is not supported; flash3 runs on cuda and cpu"
        )
    # Without CUDA a cuda tensor can only be a fake one, and tracing it is legitimate.
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else HOPPER
    if capability != HOPPER:
        name = torch.cuda.get_device_name(device)
        raise RuntimeError(
            f"flash3 needs a Hopper GPU (compute capability 9.0: H100, H200, GH200); {device} is {name} with compute "
            f"capability {capability[0]}.{capability[1]}"
        )
    return KERNEL_DTYPES


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Raises unless q (b, sq, hq, d), k and v (b, sk, hk, d) are something that flash3 computes; returns d.

    Raises:
        TypeError: not a tensor, not dense, or a dtype that is not accepted or not shared by all three.
        ValueError: shapes or devices that do not fit together, or a head_dim out of range.
        NotImplementedError: fp8, or another device type.
        RuntimeError: a GPU that is not Hopper.
    """
    check_kind(q, k, v)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not (len(q_shape) == len(k_shape) == len(v_shape) == 4):
        _raise_ndim(q=q_shape, k=k_shape, v=v_shape)
    batch, _, num_heads_q, head_dim = q_shape
    batch_k, _, num_heads_kv, head_dim_k = k_shape
    check_head_dim(head_dim)
    if batch_k != batch or head_dim_k != head_dim:
        raise ValueError(
            f"k: must have q's batch {batch} and head_dim {head_dim}, got shape {tuple(k_shape)}"
        )
    check_heads(num_heads_q, num_heads_kv)
    if v_shape != k_shape:
        check_v_shape(v_shape, k_shape)
    return head_dim


def check_kind(q: Tensor, k: Tensor, v: Tensor) -> None:
    """The checks of :func:`check_tensors` that do not look at shapes."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        _raise_not_tensor(q=q, k=k, v=v)
    if not (q.layout is k.layout is v.layout is torch.strided):
        raise TypeError(
            f"q, k, v: must be dense tensors, got layouts {q.layout}, {k.layout}, {v.layout}"
        )

    dtype, device = q.dtype, q.device
    if not (k.dtype is dtype and v.dtype is dtype):
        raise TypeError(f"q, k, v: must share one dtype, got {dtype}, {k.dtype}, {v.dtype}")
    if not (k.device == device and v.device == device):
        raise ValueError(f"q, k, v: must be on one device, got {device}, {k.device}, {v.device}")
    accepted = accepted_dtypes(device)
    if dtype not in accepted:
        _raise_dtype(dtype, device, accepted)


def check_head_dim(head_dim: int, name: str = "q") -> None:
    if head_dim % HEAD_DIM_STEP != 0 or not HEAD_DIM_STEP <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"{name}: head_dim must be a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to {MAX_HEAD_DIM}, got "
            f"{head_dim}"
        )


def check_heads(num_heads_q: int, num_heads_kv: int) -> None:
    if num_heads_q == 0 or num_heads_kv == 0 or num_heads_q % num_heads_kv != 0:
        raise ValueError(
            "q, k: the number of query heads must be a positive multiple of the number of key/value heads, got "
            f"{num_heads_q} and {num_heads_kv}"
        )


def check_scale(softmax_scale: float) -> float:
    """The scale as a float; raises unless it is a number that is positive and normal in float32."""
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (float, int)):
        raise TypeError(
            f"softmax_scale: must be None or a float, got {type(softmax_scale).__name__}"
        )
    if not MIN_SCALE <= softmax_scale <= MAX_SCALE:  # false for NaN too
        raise ValueError(
            f"softmax_scale: must be positive, finite and a normal float32, got {softmax_scale}"
        )
    return float(softmax_scale)


def check_flags(causal: bool, deterministic: bool) -> None:
    if not isinstance(causal, bool):
        raise TypeError(f"causal: must be True or False, got {causal!r}")
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic: must be True or False, got {deterministic!r}")


def check_unsupported(qv, q_descale, k_descale, v_descale, num_splits, pack_gqa, sm_margin) -> None:
    """Raises NotImplementedError for the first FlashAttention-3 parameter that asks for what flash3 lacks so far."""
    if qv is not None or q_descale is not None or k_descale is not None or v_descale is not None:
        for name, value in (
            ("qv", qv),
            ("q_descale", q_descale),
            ("k_descale", k_descale),
            ("v_descale", v_descale),
        ):
            if value is not None:
                got = (
                    f"a tensor of shape {tuple(value.shape)}"
                    if isinstance(value, Tensor)
                    else repr(value)
                )
                what = "supported yet" if name == "qv" else "supported but for float8_e4m3fn inputs"
                raise NotImplementedError(f"{name}: not {what}, must be None, got {got}")
    if num_splits != 1 and num_splits != 0:
        raise NotImplementedError(
            f"num_splits: {num_splits!r} is not supported yet, must be 0 or 1"
        )
    if pack_gqa is not None and pack_gqa is not False:
        raise NotImplementedError(
            f"pack_gqa: {pack_gqa!r} is not supported yet, must be None or False"
        )
    if sm_margin != 0:
        raise NotImplementedError(f"sm_margin: {sm_margin!r} is not supported yet, must be 0")


def _raise_not_tensor(**tensors: object) -> NoReturn:
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: must be a torch.Tensor, got {type(value).__name__}")
    raise AssertionError("all are tensors")


def _raise_dtype(
    dtype: torch.dtype, device: torch.device, accepted: tuple[torch.dtype, ...]
) -> NoReturn:
    names = ", ".join(str(d).removeprefix("torch.") for d in accepted)
    message = f"q, k, v: dtype {dtype} is not supported on {device.type}, accepted are {names}"
    if dtype == torch.float8_e4m3fn:
        raise NotImplementedError(f"{message}; float8_e4m3fn goes to flash_attn_func")
    raise TypeError(message)


def _raise_ndim(**shapes: torch.Size) -> NoReturn:
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise ValueError(
                f"{name}: must be (batch, seqlen, heads, head_dim), got shape {tuple(shape)}"
            )
    raise AssertionError("all have 4 dimensions")


def check_v_shape(v_shape: torch.Size, k_shape: torch.Size) -> None:
    """Raises unless the shapes are equal but for head_dim."""
    if v_shape[:-1] != k_shape[:-1]:
        raise ValueError(
            f"v: must have k's shape {tuple(k_shape)} but for head_dim, got {tuple(v_shape)}"
        )
    check_head_dim(v_shape[-1], "v")
