"""flash3 as the flash attention of torch: ``scaled_dot_product_attention`` and ``varlen_attn`` run its kernels.

    import flash3.sdpa
    from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel

    flash3.sdpa.register()  # tells torch the name; `import flash3` alone never does
    activate_flash_attention_impl("flash3")  # torch's own switch; restore_flash_attention_impl() undoes it
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # left to itself, torch prefers cuDNN on Hopper
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

Activation replaces the CUDA kernels of aten's flash attention operators by the functions of this module, for the whole
process. They run below autograd and below tracing: gradients, shape inference, ``torch.compile``, nested tensors and
context parallelism stay torch's own. Whatever flash3 does not compute raises; nothing falls back to torch's kernels.

Letters: B batch, S seqlen, H heads, D head_dim, T tokens of all sequences. torch's dense layout is (B, H, S, D) for
``_scaled_dot_product_*`` and flash3's own (B, S, H, D) for ``_flash_attention_*``, or (T, H, D) with sequence offsets.
torch's shape inference promises every result in the layout of ``empty_like`` of the input that it belongs to, and
compiled code relies on it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flash3 import checks, checks_varlen, ops

NAME = "flash3"

# Values that are accepted of an argument which asks for something else otherwise; of those not listed, None.
_ACCEPTED = {"dropout_p": (0.0,), "return_debug_mask": (False,), "num_splits": (None, 0, 1)}


def register() -> None:
    """Makes "flash3" known to ``torch.nn.attention.activate_flash_attention_impl``; further calls change nothing.

    Raises:
        RuntimeError: a torch that cannot exchange its flash attention.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise RuntimeError(
            f"flash3.sdpa: torch {torch.__version__} cannot exchange its flash attention; torch 2.11 and newer can"
        ) from None
    register_flash_attention_impl(NAME, register_fn=_activate)


def _activate() -> _Overrides:
    if ops.kernels_missing is not None:
        raise RuntimeError(f"flash3.sdpa: {ops.kernels_missing}")
    return _Overrides()


class _Overrides:
    """The replaced kernels; torch's own come back when the library object goes."""

    def __init__(self, dispatch_key: str = "CUDA"):
        for name in _kernels_of_this_torch():
            _check_schema(name)
        self._library = torch.library.Library("aten", "IMPL", dispatch_key)
        with warnings.catch_warnings():
            # Some versions of torch warn that a kernel is replaced, which is what activation is for.
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name in _kernels_of_this_torch():
                self._library.impl(name, _KERNELS[name].function, dispatch_key)

    def remove(self) -> None:
        self._library = None


def _kernels_of_this_torch() -> list[str]:
    return [name for name in _KERNELS if hasattr(torch.ops.aten, name)]


def _check_schema(name: str) -> None:
    """Raises if the operator of the running torch is not the one that the function here was written for.

    Keywords may be added: they arrive only where a caller sets them, and are refused then.
    """
    schema = getattr(torch.ops.aten, name).default._schema
    num_positional = sum(not argument.kwarg_only for argument in schema.arguments)
    if (num_positional, len(schema.returns)) != _KERNELS[name][1:]:
        raise RuntimeError(
            f"flash3.sdpa: flash3 does not know this operator as torch {torch.__version__} has it: {schema}"
        )


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    **unknown,
):
    """``aten::_scaled_dot_product_flash_attention``, tensors (B, H, S, D).

    The causal mask is bottom-right aligned, here and in torch's own kernel: ``torch.nn.attention.bias`` relies on it.
    ``scaled_dot_product_attention(is_causal=True)``, which is top-left aligned, comes here with equal lengths alone.
    """
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, **unknown)
    inputs = query, key, value
    q, k, v, softmax_scale = _check_heads_first(*inputs, scale)
    if _heads_fold_into_batch(*inputs):
        out, lse = ops.fwd(*(_fold(x) for x in inputs), softmax_scale, is_causal)
        out, lse = out.view(query.shape), lse.view(query.shape[:3])
    else:
        out, lse = ops.fwd(q, k, v, softmax_scale, is_causal)
        out = _in_layout_of(query, out.transpose(1, 2))
    return out, lse, None, None, query.shape[2], key.shape[2], *_no_dropout(query)


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
    **unknown,
):
    """``aten::_scaled_dot_product_flash_attention_backward``, tensors (B, H, S, D)."""
    _refuse(dropout_p=dropout_p, **unknown)
    inputs = query, key, value
    q, k, v, softmax_scale = _check_heads_first(*inputs, scale)
    if _heads_fold_into_batch(*inputs):
        tensors = [_fold(x) for x in (grad_out, *inputs, out)]
        lse = logsumexp.flatten(0, 1).unsqueeze(1)
        grads = _dense_backward(*tensors, lse, softmax_scale, is_causal)
        return tuple(grad.view(x.shape) for grad, x in zip(grads, inputs, strict=True))
    dout, out = grad_out.transpose(1, 2), out.transpose(1, 2)
    grads = _dense_backward(dout, q, k, v, out, logsumexp, softmax_scale, is_causal)
    return tuple(
        _in_layout_of(x, grad.transpose(1, 2)) for grad, x in zip(grads, inputs, strict=True)
    )


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    **unsupported,
):
    """``aten::_flash_attention_forward``: (B, S, H, D), or (T, H, D) with offsets of the sequences in ``cum_seq_*``."""
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, **unsupported)
    causal = _is_causal(is_causal, window_size_left, window_size_right)
    if cum_seq_q is None:
        _refuse(cum_seq_k=cum_seq_k, seqused_k=seqused_k)
        softmax_scale = _check(query, key, value, scale)
        out, lse = ops.fwd(query, key, value, softmax_scale, causal)
    else:
        out, lse = _varlen_forward(
            query, key, value, cum_seq_q, cum_seq_k, seqused_k, max_q, max_k, scale, causal
        )
    return _in_layout_of(query, out), lse, *_no_dropout(query)


def _flash_forward_into(out: Tensor, *args, **kwargs) -> Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``. The operators of flash3 allocate, so this copies."""
    result, lse, *_ = _flash_forward(*args, **kwargs)
    out.copy_(result)
    return lse


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unknown,
):
    """``aten::_flash_attention_backward``, layouts of :func:`_flash_forward`."""
    _refuse(dropout_p=dropout_p, **unknown)
    causal = _is_causal(is_causal, window_size_left, window_size_right)
    tensors = grad_out, query, key, value, out, logsumexp
    if cum_seq_q is None:
        _refuse(cum_seq_k=cum_seq_k)
        grads = _dense_backward(*tensors, _check(query, key, value, scale), causal)
    else:
        grads = _varlen_backward(*tensors, cum_seq_q, cum_seq_k, max_q, max_k, scale, causal)
    return tuple(_in_layout_of(x, grad) for x, grad in zip((query, key, value), grads, strict=True))


class _Kernel(NamedTuple):
    function: Callable
    num_positional: (
        int  # arguments of the operator that are not keywords, and results: what was read of torch
    )
    num_results: int


_KERNELS = {
    "_scaled_dot_product_flash_attention": _Kernel(_sdpa_forward, 6, 9),
    "_scaled_dot_product_flash_attention_backward": _Kernel(_sdpa_backward, 14, 3),
    "_flash_attention_forward": _Kernel(_flash_forward, 10, 5),
    "_flash_attention_backward": _Kernel(_flash_backward, 14, 3),
    "_flash_attention_forward_no_dropout_inplace": _Kernel(_flash_forward_into, 11, 1),
}


def _dense_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in flash3's layout; torch never differentiates lse."""
    return ops.bwd(dout, q, k, v, out, lse, None, softmax_scale, causal, _order())


def _varlen_forward(q, k, v, cu_q, cu_k, seqused_k, max_q, max_k, scale, causal):
    """out (T, H, D) and lse (H, T) of packed sequences."""
    softmax_scale = _check_packed(q, k, v, cu_q, cu_k, seqused_k, max_q, max_k, scale)
    return ops.varlen_fwd(q, k, v, cu_q, cu_k, None, seqused_k, softmax_scale, causal)


def _varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, scale, causal):
    """dq, dk, dv (T, H, D) of packed sequences; torch differentiates neither lse nor calls with seqused_k."""
    softmax_scale = _check_packed(q, k, v, cu_q, cu_k, None, max_q, max_k, scale)
    sequences = cu_q, cu_k, None, None
    return ops.varlen_bwd(
        dout, q, k, v, out, lse, None, *sequences, softmax_scale, causal, _order()
    )


def _check_packed(q, k, v, cu_q, cu_k, seqused_k, max_q, max_k, scale) -> float:
    """Checks packed tensors as the public function does; returns the scale."""
    if cu_k is None:
        raise ValueError("cum_seq_k: must be a tensor of offsets where cum_seq_q is one, got None")
    sequences = cu_q, cu_k, None, seqused_k
    head_dim = checks_varlen.check_call(q, k, v, sequences, (max_q, max_k))
    return _softmax_scale(scale, _one_head_dim(head_dim, v))


def _refuse(**arguments: object) -> None:
    """Raises NotImplementedError for the first argument that asks for what flash3 does not do."""
    for name, value in arguments.items():
        accepted = _ACCEPTED.get(name, (None,))
        if isinstance(value, Tensor) or value not in accepted:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
            raise NotImplementedError(
                f"{name}: {got} is not supported by flash3, must be {' or '.join(map(str, accepted))}"
            )


def _is_causal(causal: bool, left: int | None, right: int | None) -> bool:
    """Whether the mask is the causal one; aten's None is the -1, for unbounded, of ``window_size``."""
    left, right = (-1 if side is None else side for side in (left, right))
    if left != -1 or right not in (-1, 0):
        raise NotImplementedError(
            f"window_size: {(left, right)} is not supported yet; (-1, -1) and (-1, 0), which is causal, are"
        )
    return causal or right == 0


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> float:
    """Checks tensors in flash3's layout as the public function does; returns the scale."""
    return _softmax_scale(scale, _one_head_dim(checks.check_tensors(q, k, v), v))


def _check_heads_first(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Checks tensors (B, H, S, D); returns them as flash3 has them, (B, S, H, D), and the scale."""
    if not query.dim() == key.dim() == value.dim() == 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(
            f"query, key, value: must be (batch, heads, seqlen, head_dim), got shapes {shapes}"
        )
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return q, k, v, _softmax_scale(scale, _one_head_dim(checks.check_tensors(q, k, v), v))


def _one_head_dim(head_dim: int, v: Tensor) -> int:
    """torch promises results in the layout of ``query``, which those of another head_dim cannot have."""
    if v.shape[-1] != head_dim:
        raise NotImplementedError(
            f"value: head_dim {v.shape[-1]} must be query's, {head_dim}, in torch's operators; "
            "flash3.flash_attn_func takes any"
        )
    return head_dim


def _softmax_scale(scale: float | None, head_dim: int) -> float:
    return head_dim**-0.5 if scale is None else checks.check_scale(scale)


def _order() -> int:
    return int(torch.are_deterministic_algorithms_enabled())


def _heads_fold_into_batch(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether contiguous (B, H, S, D) tensors can be had in their own layout without a copy.

    flash3 writes (batch, S, heads, D). With as many key/value heads as query heads, each head can be a batch entry of
    its own: what is written as (B * H, S, 1, D) is (B, H, S, D).
    """
    same_heads = query.shape[1] == key.shape[1]
    return same_heads and all(x.is_contiguous() for x in (query, key, value))


def _fold(x: Tensor) -> Tensor:
    """(B, H, S, D) -> (B * H, S, 1, D); a view unless the layout forbids it, as that of a gradient may."""
    return x.flatten(0, 1).unsqueeze(2)


def _in_layout_of(x: Tensor, result: Tensor) -> Tensor:
    """``result``, copied only if its strides are not those of ``empty_like(x)``."""
    if _same_strides(result, x):
        return result
    promised = torch.empty_like(x)
    return result if _same_strides(result, promised) else promised.copy_(result)


def _same_strides(x: Tensor, y: Tensor) -> bool:
    """Where the extent is 1 the stride addresses nothing."""
    strides = zip(x.shape, x.stride(), y.stride(), strict=True)
    return all(extent == 1 or ours == theirs for extent, ours, theirs in strides)


def _no_dropout(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """State of the random numbers and debug mask, in the shapes that torch infers. Nobody reads them, so nothing
    writes them, and they are new each time: a cached one would outlive inference mode or the capture of a graph."""
    device = query.device
    return (
        torch.empty(2, dtype=torch.uint64, device=device),
        torch.empty((), dtype=torch.uint64, device=device),
        torch.empty(0, dtype=query.dtype, device=device),
    )
