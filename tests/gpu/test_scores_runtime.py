"""Windows, chunks, softcap and sinks under CUDA graphs, torch.compile, checkpointing, DDP, and without host waits."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from cases import Case
from score_cases import COMBINATIONS, sink_of
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import flash3

BF16 = torch.bfloat16
GROUPED = {"num_heads_q": 4, "num_heads_kv": 2}
EVERYTHING = COMBINATIONS[-1]
ARGUMENTS = [{"window_size": (100, 0)}, {"causal": True, "softcap": 5.0}, EVERYTHING]
features = pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
head_dims = pytest.mark.parametrize("head_dim", [64, 128, 256])


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def leaves_of(inputs, sink):
    return [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, sink)]


def step(leaves, dout, attend):
    """out, lse and the gradients of q, k, v and the sink."""
    out, lse = attend(*leaves)
    return (
        out,
        lse,
        *torch.autograd.grad((out, lse.sum()), leaves, (dout, torch.ones_like(lse.sum()))),
    )


def dense(arguments):
    def attend(q, k, v, sink):
        return flash3.flash_attn_func(
            q, k, v, deterministic=True, return_lse=True, learnable_sink=sink, **arguments
        )

    return attend


def packed(arguments, ends_q, ends_k):
    def attend(q, k, v, sink):
        return flash3.flash_attn_varlen_func(
            *(q, k, v, ends_q, ends_k, 300, 300),
            deterministic=True,
            return_lse=True,
            learnable_sink=sink,
            **arguments,
        )

    return attend


def assert_equal(results, expected):
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x, y)


def captured(make):
    """Warms up `make` on a side stream, as torch asks for, and captures it: (graph, static results)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        make()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = make()
    return graph, results


@features
@head_dims
def test_cuda_graph(head_dim, arguments, flash3_rows):
    flash3_rows(BF16, head_dim, "local")
    inputs = Case(300, 400, head_dim, **GROUPED).inputs(BF16, "cuda")
    leaves, dout = leaves_of(inputs, sink_of(4, BF16, "cuda")), inputs.dout.clone()
    attend = dense(arguments)
    graph, results = captured(lambda: step(leaves, dout, attend))
    for _ in range(3):
        with torch.no_grad():
            for x in (*leaves, dout):
                x.normal_()
        graph.replay()
        assert_equal(results, step(leaves, dout, attend))


@features
@head_dims
def test_a_graph_replays_with_shorter_sequences(head_dim, arguments, flash3_rows):
    """Captured with the tensors full; afterwards with less in them, an empty sequence and one of other length."""
    flash3_rows(BF16, head_dim, "local", layout="packed")
    rows = 900
    q, k, v, dout = (torch.randn(rows, h, head_dim, device="cuda").to(BF16) for h in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in (q, k, v, sink_of(4, torch.float32, "cuda"))]
    ends_q, ends_k = int32(0, 300, 600, 900), int32(0, 300, 600, 900)
    attend = packed(arguments, ends_q, ends_k)
    graph, results = captured(lambda: step(leaves, dout, attend))
    for new_q, new_k in (
        ((0, 300, 600, 900), (0, 300, 600, 900)),
        ((0, 17, 17, 130), (0, 200, 230, 231)),
        ((0, 1, 250, 251), (0, 0, 64, 128)),
        ((0, 0, 0, 0), (0, 0, 0, 0)),
    ):
        ends_q.copy_(int32(*new_q))
        ends_k.copy_(int32(*new_k))
        graph.replay()
        assert_equal(results, step(leaves, dout, attend))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_compile(layout, backend, flash3_rows):
    """One graph for all lengths, with the eager results."""
    flash3_rows(BF16, 64, "local", layout=layout)
    if backend == "inductor":
        pytest.importorskip("triton")
    torch._dynamo.reset()

    def block(q, k, v, sink, ends_q, ends_k):
        attend = dense(EVERYTHING) if layout == "dense" else packed(EVERYTHING, ends_q, ends_k)
        out, lse = attend(q, k, v, sink)
        return out * 2, lse

    compiled = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    for lengths in ((300, 400), (123, 77), (64, 257)):
        inputs = Case(*lengths, 64, batch=3, **GROUPED).inputs(BF16, "cuda")
        tensors = [*leaves_of(inputs, sink_of(4, torch.float32, "cuda"))]
        dout = inputs.dout
        ends = [torch.arange(4, dtype=torch.int32, device="cuda") * n for n in lengths]
        if layout == "packed":
            tensors[:3] = [x.detach().flatten(0, 1).requires_grad_() for x in tensors[:3]]
            dout = dout.flatten(0, 1)
        results = [
            step(tensors, dout, lambda *x, f=function, ends=ends: f(*x, *ends))
            for function in (compiled, block)
        ]
        assert_equal(*results)


@features
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_host_synchronisation(arguments, deterministic, flash3_rows):
    for layout in ("dense", "packed"):
        flash3_rows(BF16, 64, "local", layout=layout)
    inputs = Case(300, 400, 64, **GROUPED).inputs(BF16, "cuda")
    leaves = leaves_of(inputs, sink_of(4, torch.float32, "cuda"))
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in leaves[:3]]
    flat.append(leaves[3])
    ends = [torch.arange(3, dtype=torch.int32, device="cuda") * n for n in (300, 400)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(leaves, inputs.dout, dense({**arguments}))
        step(flat, inputs.dout.flatten(0, 1), packed(arguments, *ends))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("arguments", [{}, *ARGUMENTS], ids=str)
@head_dims
def test_forward_is_one_launch(head_dim, arguments, flash3_rows):
    flash3_rows(BF16, head_dim, "local")
    inputs = Case(300, 400, head_dim, **GROUPED).inputs(BF16, "cuda")
    sink = sink_of(4, torch.float32, "cuda")

    def attend():
        return flash3.flash_attn_func(
            inputs.q, inputs.k, inputs.v, learnable_sink=sink, **arguments
        )

    attend()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        attend()
        torch.cuda.synchronize()
    on_gpu = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not on_gpu:
        pytest.skip("the profiler sees no GPU activity here")
    assert len(on_gpu) == 1 and "fwd_kernel" in on_gpu[0]


class Layer(torch.nn.Module):
    """Projection, attention with a window and sinks, projection; x is (rows, width)."""

    def __init__(self, layout: str):
        super().__init__()
        self.layout = layout
        self.into = torch.nn.Linear(256, 3 * 256)
        self.out = torch.nn.Linear(256, 256)
        self.sink = torch.nn.Parameter(torch.linspace(-1, 1, 4))
        self.ends = int32(0, 200, 200, 333)

    def forward(self, x):
        qkv = self.into(x).unflatten(-1, (3, 4, 64))
        arguments = {"causal": True, "window_size": (40, 0), "learnable_sink": self.sink}
        arguments["deterministic"] = True
        if self.layout == "packed":
            out = flash3.flash_attn_varlen_func(
                *qkv.unbind(1), self.ends, self.ends, 200, 200, **arguments
            )
        else:
            out = flash3.flash_attn_func(*qkv[None].unbind(2), **arguments)[0]
        return self.out(out.flatten(-2))


def gradients(function, layer, x):
    layer.zero_grad()
    with torch.autocast("cuda", dtype=BF16):
        out = function(x)
    out.float().square().sum().backward()
    return [p.grad.clone() for p in layer.parameters()]


@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("saved", [False, True])
def test_selective_activation_checkpointing(layout, saved, flash3_rows):
    flash3_rows(BF16, 64, "local", layout=layout)
    op = torch.ops.flash3.varlen_fwd if layout == "packed" else torch.ops.flash3.fwd

    def policy(ctx, function, *args, **kwargs):
        if saved and function is op.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    layer, x = Layer(layout).cuda(), torch.randn(333, 256, device="cuda")
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    plain = gradients(layer, layer, x)
    selective = gradients(
        lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=contexts), layer, x
    )
    # The policy looks at each operator, and what it makes torch do for a linear layer rounds otherwise.
    for a, b in zip(plain, selective, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * a.abs().max().item())


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_distributed_data_parallel_on_one_process(layout, tmp_path, flash3_rows):
    flash3_rows(BF16, 64, "local", layout=layout)
    layer, x = Layer(layout).cuda(), torch.randn(333, 256, device="cuda")
    plain = gradients(layer, layer, x)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(layer)
        for _, (a, b) in itertools.product(
            range(2), zip(plain, gradients(parallel, layer, x), strict=True)
        ):
            torch.testing.assert_close(a, b)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@features
def test_second_device(arguments, flash3_rows):
    """The tensors' device counts, not the current one."""
    flash3_rows(BF16, 64, "local")
    inputs = Case(300, 400, 64, **GROUPED).inputs(BF16, "cuda:1")
    leaves = leaves_of(inputs, sink_of(4, torch.float32, "cuda:1"))
    on_cpu = [x.detach().cpu().requires_grad_() for x in leaves]
    results = step(leaves, inputs.dout, dense(arguments))
    expected = step(on_cpu, inputs.dout.cpu(), dense(arguments))
    for x, y in zip(results, expected, strict=True):
        assert x.device == torch.device("cuda:1")
        torch.testing.assert_close(x.cpu(), y, rtol=3e-2, atol=3e-2)
