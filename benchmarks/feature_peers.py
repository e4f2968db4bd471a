"""Who computes the shapes of benchmarks/features.py: flash3, FlexAttention, torch's varlen attention, official FA3."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

import flash3

from .baselines import PACKAGES, import_first
from .feature_shapes import Shape

Forward = Callable[..., Tensor]  # (q, k, v) -> out, in the layout of the tensors


class CannotCompute(Exception):
    """This contender has nothing for such a shape; the message says what is missing."""


def ends_of(shape: Shape, device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(shape.lengths)], dtype=torch.int32, device=device)


def flash3_forward(shape: Shape, device: torch.device, sink: Tensor | None) -> Forward:
    arguments = {**shape.arguments(), "learnable_sink": sink}
    if not shape.packed:
        return lambda q, k, v: flash3.flash_attn_func(q, k, v, **arguments)
    ends, longest = ends_of(shape, device), max(shape.lengths)

    def packed(q, k, v):
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out = flash3.flash_attn_varlen_func(*flat, ends, ends, longest, longest, **arguments)
        return out[None]

    return packed


def visible(shape: Shape, document: Tensor | None) -> Callable[..., Tensor]:
    """FlexAttention's mask of the shape: which keys a query sees, elementwise."""
    left, right = shape.window

    def mask(b, h, i, j):
        seen = i >= j if shape.causal else i == i
        if left != -1:
            seen = seen & (i - j <= left)
        if right != -1:
            seen = seen & (j - i <= right)
        if shape.chunk:
            seen = seen & (i // shape.chunk == j // shape.chunk)
        return seen if document is None else seen & (document[i] == document[j])

    return mask


def flex_forward(shape: Shape, device: torch.device, sink: Tensor | None) -> Forward:
    """torch.compile makes a kernel for each shape: seconds."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if sink is not None:
        raise CannotCompute("no sinks")
    document = None
    if shape.packed:
        lengths = torch.tensor(shape.lengths, device=device)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    seqlen = shape.rows[1]
    compiled = device.type == "cuda"
    mask = create_block_mask(
        visible(shape, document), None, None, seqlen, seqlen, device=device, _compile=compiled
    )
    cap = shape.softcap

    def capped(score, b, h, i, j):
        return cap * torch.tanh(score / cap)

    # What it compiled for other shapes counts against a limit, beyond which it compiles no more.
    torch._dynamo.reset()
    attend = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    def forward(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        score_mod = capped if cap else None
        return attend(q, k, v, score_mod, mask, enable_gqa=grouped).transpose(1, 2)

    return forward


def torch_varlen_forward(shape: Shape, device: torch.device, sink: Tensor | None) -> Forward:
    from torch.nn.attention.varlen import varlen_attn

    if not shape.packed:
        raise CannotCompute("packed sequences only")
    if shape.chunk or shape.softcap or sink is not None:
        raise CannotCompute("no chunk, softcap or sinks")
    known = inspect.signature(varlen_attn).parameters
    options = {}
    if "window_size" in known:
        options["window_size"] = (shape.window[0], 0 if shape.causal else shape.window[1])
    elif shape.window == (-1, -1):
        options["is_causal"] = shape.causal
    else:
        raise CannotCompute("no windows in this torch")
    if shape.heads != shape.heads_kv:
        if "enable_gqa" not in known:
            raise CannotCompute("no grouped heads in this torch")
        options["enable_gqa"] = True
    ends, longest = ends_of(shape, device), max(shape.lengths)

    def forward(q, k, v):
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return varlen_attn(*flat, ends, ends, longest, longest, **options)[None]

    return forward


def fa3_forward(shape: Shape, device: torch.device, sink: Tensor | None) -> Forward:
    module = import_first(PACKAGES["fa3"][1])
    if sink is not None:
        raise CannotCompute("no sinks")
    arguments = shape.arguments()
    ends = ends_of(shape, device) if shape.packed else None

    def forward(q, k, v):
        if ends is None:
            out = module.flash_attn_func(q, k, v, **arguments)
        else:
            flat = (x.flatten(0, 1) for x in (q, k, v))
            longest = max(shape.lengths)
            out = module.flash_attn_varlen_func(*flat, ends, ends, longest, longest, **arguments)
        out = out[0] if isinstance(out, tuple) else out  # some return (out, lse)
        return out if ends is None else out[None]

    return forward


PEERS: dict[str, Callable[..., Forward]] = {
    "flash3": flash3_forward,
    "flex": flex_forward,
    "torch_varlen": torch_varlen_forward,
    "fa3": fa3_forward,
}
LABELS = {
    "flash3": "flash3",
    "flex": "FlexAttention",
    "torch_varlen": "torch varlen_attn",
    "fa3": "official FA3",
    "plain": "flash3 without the feature",
}
