"""From a cell to calls: inputs in each implementation's layout, and forward or backward alone."""

import itertools
from collections.abc import Callable
from functools import partial

import torch

from .baselines import BHSD, Implementation
from .shapes import DTYPES, Cell


def make_values(cell: Cell, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """q, k, v and dout of the cell, N(0, 1), in (batch, seqlen, heads, head_dim)."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(seqlen: int, heads: int, head_dim: int) -> torch.Tensor:
        shape = (cell.batch, seqlen, heads, head_dim)
        return torch.randn(shape, generator=generator, device=device).to(DTYPES[cell.dtype])

    queries, keys = (cell.seqlen, cell.heads), (cell.keys, cell.heads_kv)
    scores, values = cell.head_dim, cell.values_dim
    shapes = {
        "q": (*queries, scores),
        "k": (*keys, scores),
        "v": (*keys, values),
        "dout": (*queries, values),
    }
    return {name: randn(*shape) for name, shape in shapes.items()}


def to_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Contiguous in `layout`, so that no implementation is timed with copies or odd strides."""
    return tensor.transpose(1, 2).contiguous() if layout == BHSD else tensor


def from_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    return tensor.transpose(1, 2) if layout == BHSD else tensor


def forward_call(cell: Cell, implementation: Implementation, values: dict) -> Callable[[], tuple]:
    """A call that returns (out,) and records no graph."""
    q, k, v = (to_layout(values[name], implementation.layout) for name in "qkv")
    return lambda: (implementation.forward(q, k, v, cell.causal),)


def backward_call(cell: Cell, implementation: Implementation, values: dict) -> Callable[[], tuple]:
    """A call that returns (dq, dk, dv): the graph is recorded here once and kept."""
    leaves = [to_layout(values[x], implementation.layout).detach().clone() for x in "qkv"]
    for leaf in leaves:
        leaf.requires_grad_()
    with implementation.context():
        out = implementation.forward(*leaves, cell.causal)
    dout = torch.empty_like(out)  # keeps out's strides: a gradient as the next layer would give it
    dout.copy_(to_layout(values["dout"], implementation.layout))
    return partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)


def make_call(cell: Cell, implementation: Implementation, values: dict) -> Callable[[], tuple]:
    build = forward_call if cell.mode == "fwd" else backward_call
    return build(cell, implementation, values)


def rotating(calls: list[Callable[[], tuple]]) -> Callable[[], tuple]:
    """One call that goes through `calls` in turn: inputs that L2 does not hold from last time."""
    if len(calls) == 1:
        return calls[0]
    turn = itertools.cycle(calls)
    return lambda: next(turn)()
