"""Time spent in attention alone, at a model's own shape and strides."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from gpt import GPTConfig

CALLS = 4  # between two events


def milliseconds(call: Callable[[], object], device: torch.device, samples: int) -> float:
    """Milliseconds per warm call, median over `samples`: CUDA events, or the host's clock."""
    for _ in range(2):
        call()
    spent = []
    for _ in range(samples):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call()  # keeps the GPU busy while the host queues what is timed
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            spent.append(begin.elapsed_time(end) / CALLS)
        else:
            start = time.perf_counter()
            call()
            spent.append((time.perf_counter() - start) * 1e3)
    return statistics.median(spent)


def attention_milliseconds(
    config: GPTConfig, function: Callable, batch: int, length: int, device: torch.device
) -> dict[str, float]:
    """{"forward", "backward"}: milliseconds of one layer's attention, bf16, N(0, 1) inputs.

    length: of the tensors, a shard where ranks divide the sequence. All of them have to call this.
    """
    leaves = [
        torch.randn(batch, length, heads, config.head_dim, device=device)
        .bfloat16()
        .requires_grad_()
        for heads in (config.heads, config.kv_heads, config.kv_heads)
    ]
    out = function(*leaves)
    backward = partial(torch.autograd.grad, out, leaves, torch.randn_like(out), retain_graph=True)
    samples = 20 if device.type == "cuda" else 9
    with torch.no_grad():
        forward = milliseconds(lambda: function(*leaves), device, samples)
    return {"forward": forward, "backward": milliseconds(backward, device, samples)}
