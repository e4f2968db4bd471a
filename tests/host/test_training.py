"""What training loops wrap around a call: selective activation checkpointing, DistributedDataParallel, autocast."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flash3
from flash3 import reference

ENDS = torch.tensor((0, 5, 5, 18), dtype=torch.int32)


class Layer(torch.nn.Module):
    """Projection, attention with a window and sinks, projection."""

    def __init__(self, packed: bool):
        super().__init__()
        self.packed = packed
        self.into = torch.nn.Linear(32, 3 * 32)
        self.out = torch.nn.Linear(32, 32)
        self.sink = torch.nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x):
        qkv = self.into(x).unflatten(-1, (3, 4, 8))
        arguments = {"causal": True, "window_size": (4, 0), "learnable_sink": self.sink}
        if self.packed:
            out = flash3.flash_attn_varlen_func(*qkv.unbind(1), ENDS, ENDS, 13, 13, **arguments)
        else:
            out = flash3.flash_attn_func(*qkv[None].unbind(2), **arguments)[0]
        return self.out(out.flatten(-2))


def gradients(function, layer, x):
    layer.zero_grad()
    function(x).square().sum().backward()
    return [p.grad.clone() for p in layer.parameters()]


@pytest.fixture
def count_forwards(monkeypatch):
    counted = []
    real = reference._finite

    def counting(row_max):
        counted.append(1)
        return real(row_max)

    monkeypatch.setattr(reference, "_finite", counting)
    return counted


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_selective_activation_checkpointing(packed, saved, count_forwards):
    """Where the policy saves the operator's results, the backward does not compute them again."""
    op = torch.ops.flash3.varlen_fwd if packed else torch.ops.flash3.fwd
    asked = []

    def policy(ctx, function, *args, **kwargs):
        if function is op.default:
            asked.append(function)
            if saved:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    layer, x = Layer(packed), torch.randn(18, 32)
    plain = gradients(layer, layer, x)
    once = len(count_forwards)
    count_forwards.clear()
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    selective = gradients(
        lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=contexts), layer, x
    )
    assert asked and len(count_forwards) == (once if saved else 2 * once)
    assert all(torch.equal(a, b) for a, b in zip(plain, selective, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_distributed_data_parallel_on_one_process(packed, tmp_path):
    layer, x = Layer(packed), torch.randn(18, 32)
    plain = gradients(layer, layer, x)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(layer)
        for _ in range(2):
            for a, b in zip(plain, gradients(parallel, layer, x), strict=True):
                torch.testing.assert_close(a, b)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("packed", [False, True])
def test_autocast_of_the_projections(packed):
    layer, x = Layer(packed), torch.randn(18, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
        out.float().sum().backward()
    assert layer.sink.grad.dtype == torch.float32 and layer.sink.grad.isfinite().all()
