"""The operators of ``torch.ops.flash3``: schemas, shape inference, CPU implementation, CUDA registration.

``flash3._C``, where it was built, registers the CUDA implementation when it is imported. ``fwd`` and ``bwd`` are
functional: they allocate what they return and change no argument. ``merge`` writes where it is told to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash3 import ops_fp8, reference, reference_varlen

# Which keys are seen and what becomes of a score: flash3/mask.py, flash3/reference.py. A plain call leaves these out.
# They are positional, the sink too, because torch registers no gradient of a keyword-only tensor.
_SCORES = "int window_left=-1, int window_right=-1, int attention_chunk=0, float softcap=0.0"

# `order` of the gradients' sums: 0 free, 1 fixed, 2 fixed and the same in every batch (csrc/launch/plan.h). It has no
# effect on the forward: it rides along for the gradient formula (flash3/autograd.py).
torch.library.define(
    "flash3::fwd",
    "(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, int order=0,"
    f" Tensor? sink=None, {_SCORES}) -> (Tensor out, Tensor lse)",
)
torch.library.define(
    "flash3::bwd",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse,"
    f" float softmax_scale, bool causal, int order, {_SCORES}) -> (Tensor dq, Tensor dk, Tensor dv)",
)
# Dense or packed tensors. Rows whose lse is -inf do not count.
torch.library.define(
    "flash3::sink_bwd",
    "(Tensor dout, Tensor out, Tensor lse, Tensor? dlse, Tensor sink) -> Tensor dsink",
)
# out and lse may be the tensors of the first part.
torch.library.define(
    "flash3::merge",
    "(Tensor(a!) out, Tensor(b!) lse, Tensor out_1, Tensor lse_1, Tensor out_2, Tensor lse_2) -> ()",
)
# Packed sequences: flash3/reference_varlen.py says what the four int32 tensors mean.
_SEQUENCES = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k"
torch.library.define(
    "flash3::varlen_fwd",
    f"(Tensor q, Tensor k, Tensor v, {_SEQUENCES}, float softmax_scale, bool causal,"
    f" int order=0, Tensor? sink=None, {_SCORES}) -> (Tensor out, Tensor lse)",
)
torch.library.define(
    "flash3::varlen_bwd",
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, {_SEQUENCES},"
    f" float softmax_scale, bool causal, int order, {_SCORES}) -> (Tensor dq, Tensor dk, Tensor dv)",
)

fwd = torch.ops.flash3.fwd.default
bwd = torch.ops.flash3.bwd.default
sink_bwd = torch.ops.flash3.sink_bwd.default
merge = torch.ops.flash3.merge.default
varlen_fwd = torch.ops.flash3.varlen_fwd.default
varlen_bwd = torch.ops.flash3.varlen_bwd.default


@torch.library.impl("flash3::fwd", "cpu")
def _fwd_cpu(q, k, v, softmax_scale, causal, order=0, *extras):
    return reference.attention_forward(q, k, v, softmax_scale, causal, *extras)


@torch.library.impl("flash3::bwd", "cpu")
def _bwd_cpu(dout, q, k, v, out, lse, dlse, softmax_scale, causal, order, *extras):
    # Sums run in one fixed order here.
    return reference.attention_backward(
        dout, q, k, v, out, lse, dlse, softmax_scale, causal, *extras
    )


@torch.library.impl("flash3::sink_bwd", "cpu")
def _sink_bwd_cpu(dout, out, lse, dlse, sink):
    return reference.sink_backward(dout, out, lse, dlse, sink)


@torch.library.impl("flash3::merge", "cpu")
def _merge_cpu(out, lse, out_1, lse_1, out_2, lse_2):
    merged, merged_lse = reference.merge(out_1, lse_1, out_2, lse_2)
    out.copy_(merged)
    lse.copy_(merged_lse)


@torch.library.register_fake("flash3::fwd")
def _fwd_fake(q, k, v, *rest):
    batch, seqlen_q, num_heads_q, _ = q.shape
    lse = q.new_empty((batch, num_heads_q, seqlen_q), dtype=reference.accumulate_dtype(q.dtype))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


@torch.library.register_fake("flash3::bwd")
def _bwd_fake(dout, q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.register_fake("flash3::sink_bwd")
def _sink_bwd_fake(dout, out, lse, dlse, sink):
    return sink.new_empty(sink.shape)


@torch.library.register_fake("flash3::merge")
def _merge_fake(out, lse, out_1, lse_1, out_2, lse_2):
    return None


@torch.library.impl("flash3::varlen_fwd", "cpu")
def _varlen_fwd_cpu(q, k, v, cu_q, cu_k, used_q, used_k, softmax_scale, causal, order=0, *extras):
    return reference_varlen.varlen_forward(
        q, k, v, cu_q, cu_k, used_q, used_k, softmax_scale, causal, *extras
    )


@torch.library.impl("flash3::varlen_bwd", "cpu")
def _varlen_bwd_cpu(*args):
    # Without args[13], the order: it is fixed here.
    return reference_varlen.varlen_backward(*args[:13], *args[14:])


@torch.library.register_fake("flash3::varlen_fwd")
def _varlen_fwd_fake(q, k, v, *rest):
    total_q, num_heads_q, _ = q.shape
    lse = q.new_empty((num_heads_q, total_q), dtype=reference.accumulate_dtype(q.dtype))
    return q.new_empty((total_q, num_heads_q, v.shape[2])), lse


@torch.library.register_fake("flash3::varlen_bwd")
def _varlen_bwd_fake(dout, q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _load_kernels() -> str | None:
    """Registers the CUDA kernels. Returns None, or the reason why there are none."""
    try:
        import flash3._C  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "flash3._C":
            return f"flash3._C could not be loaded: {error}"
        return (
            "the CUDA kernels of flash3 are not built in this installation. Build them with `pip install .` in a "
            "checkout, next to a CUDA build of torch and with nvcc; `python -m flash3.doctor` says what is missing"
        )
    except ImportError as error:
        return f"flash3._C could not be loaded: {error}"
    return None


kernels_missing: str | None = _load_kernels()

if kernels_missing is not None:

    def _raise_kernels_missing(*args: object) -> tuple[Tensor, ...]:
        raise RuntimeError(f"flash3: {kernels_missing}")

    for _op in (
        "fwd", "bwd", "sink_bwd", "varlen_fwd", "varlen_bwd", "merge", *ops_fp8.NAMES,
    ):  # fmt: skip
        torch.library.impl(f"flash3::{_op}", "cuda")(_raise_kernels_missing)
