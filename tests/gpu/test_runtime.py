"""Streams, devices, CUDA graphs, torch.compile, host synchronisation, memory and CUDA errors."""

import pytest
import torch
from attention_math import run_flash3, run_float64, run_same_dtype
from cases import Case, both_masks
from tolerance import assert_as_accurate

import flash3

BF16 = torch.bfloat16
CASES = both_masks([Case(300, 400, d, num_heads_q=4) for d in (64, 128, 256)])


def leaves_of(inputs):
    return [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]


def step(leaves, dout, causal):
    """Forward and deterministic backward: out, lse, dq, dk, dv."""
    out, lse = flash3.flash_attn_func(*leaves, causal=causal, deterministic=True, return_lse=True)
    return out, lse, *torch.autograd.grad(out, leaves, dout)


def assert_equal(results, expected):
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_current_stream(case, flash3_rows):
    """Inputs appear late on the stream of the call: a launch on another stream would read the old ones."""
    flash3_rows(BF16, case.head_dim, case.causal)
    inputs = case.inputs(BF16, "cuda")
    expected = step(leaves_of(inputs), inputs.dout, case.causal)
    late = leaves_of(inputs)
    with torch.no_grad():
        for x in late:
            x.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        with torch.no_grad():
            for x, value in zip(late, (inputs.q, inputs.k, inputs.v), strict=True):
                x.copy_(value)
        results = step(late, inputs.dout, case.causal)
    stream.synchronize()
    assert_equal(results, expected)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_streams_side_by_side(head_dim, flash3_rows):
    """Calls on different streams overlap, and share nothing: schedules count their tiles per stream."""
    flash3_rows(BF16, head_dim, True)
    cases = [Case(s, s, head_dim, num_heads_q=h) for s, h in ((2000, 16), (130, 40), (700, 4))]
    inputs = [case.inputs(BF16, "cuda") for case in cases]

    def attend(index):
        x = inputs[index % len(inputs)]
        return flash3.flash_attn_func(x.q, x.k, x.v, causal=True)

    expected = [attend(i) for i in range(len(cases))]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # the host gets ahead of all of them
    for i in range(60):
        with torch.cuda.stream(streams[i % 3]):
            results.append(attend(i // 3 + i))
    torch.cuda.synchronize()
    assert_equal(results, [expected[(i // 3 + i) % len(cases)] for i in range(60)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_is_one_launch(case, flash3_rows):
    flash3_rows(BF16, case.head_dim, case.causal)
    inputs = case.inputs(BF16, "cuda")

    def attend():
        return flash3.flash_attn_func(inputs.q, inputs.k, inputs.v, causal=case.causal)

    attend()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        attend()
        torch.cuda.synchronize()
    on_gpu = [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not on_gpu:
        pytest.skip("the profiler sees no GPU activity here")
    assert len(on_gpu) == 1 and "fwd_kernel" in on_gpu[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_second_device(case, flash3_rows):
    """The tensors' device counts, not the current one."""
    flash3_rows(BF16, case.head_dim, case.causal)
    if not flash3.is_available("cuda:1"):
        pytest.skip("cuda:1 is not a Hopper GPU")
    inputs = case.inputs(BF16, "cuda:1", dlse=True)
    result = run_flash3(inputs, causal=case.causal)
    assert torch.cuda.current_device() == 0
    assert result.out.device == result.dq.device == torch.device("cuda:1")
    assert_as_accurate(
        result,
        run_float64(inputs, causal=case.causal),
        run_same_dtype(inputs, causal=case.causal),
        inputs,
    )


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


@pytest.mark.parametrize("with_backward", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_graph(case, with_backward, flash3_rows):
    flash3_rows(BF16, case.head_dim, case.causal)
    inputs = case.inputs(BF16, "cuda")
    leaves, dout = leaves_of(inputs), inputs.dout.clone()

    def make():
        if with_backward:
            return step(leaves, dout, case.causal)
        with torch.no_grad():
            return flash3.flash_attn_func(*leaves, causal=case.causal, return_lse=True)

    graph, results = captured(make)
    for _ in range(3):
        with torch.no_grad():
            for x in (*leaves, dout):
                x.normal_()
        graph.replay()
        assert_equal(results, make())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_compile(case, backend, flash3_rows):
    flash3_rows(BF16, case.head_dim, case.causal)
    if backend == "inductor":
        pytest.importorskip("triton")
    torch._dynamo.reset()

    def block(q, k, v):
        out, lse = flash3.flash_attn_func(
            q, k, v, causal=case.causal, deterministic=True, return_lse=True
        )
        return out * 2, lse

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    inputs = case.inputs(BF16, "cuda", dlse=True)

    def run(function):
        leaves = leaves_of(inputs)
        out, lse = function(*leaves)
        return out, lse, *torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))

    assert_equal(run(compiled), run(block))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_host_synchronisation(case, deterministic, flash3_rows):
    flash3_rows(BF16, case.head_dim, case.causal)
    inputs = case.inputs(BF16, "cuda", dlse=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_flash3(inputs, causal=case.causal, deterministic=deterministic)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_return_before_the_gpu_has_finished(case, flash3_rows):
    """Synchronisation that torch does not know of would wait for the sleep in front of the call."""
    flash3_rows(BF16, case.head_dim, case.causal)
    inputs = case.inputs(BF16, "cuda")
    run_flash3(inputs, causal=case.causal)  # allocates and loads what the first call needs
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # about 0.2 s
    run_flash3(inputs, causal=case.causal)
    still_busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert still_busy


@pytest.mark.parametrize("seqlen", [512, 4096])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_memory(case, seqlen, flash3_rows):
    """Less than 1 MiB beyond inputs and outputs."""
    flash3_rows(BF16, case.head_dim, case.causal, passes=("fwd",))
    inputs = case.with_(seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=8).inputs(BF16, "cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = flash3.flash_attn_func(
        inputs.q, inputs.k, inputs.v, causal=case.causal, return_lse=True
    )
    extra = torch.cuda.max_memory_allocated() - before - out.nbytes - lse.nbytes
    assert extra < 1 << 20


def test_out_of_memory_is_a_python_error(flash3_rows):
    """An output of 16 TiB cannot be had. The process lives, and the next call works."""
    flash3_rows(BF16, 64, False, passes=("fwd",))
    q = torch.zeros(1, 1, 1, 64, dtype=BF16, device="cuda")
    huge = q.expand(2**17, 2**16, 16, 64)
    with pytest.raises(RuntimeError, match=r"memory|allocate"):
        flash3.flash_attn_func(huge, q.expand(2**17, 1, 1, 64), q.expand(2**17, 1, 1, 64))
    assert (flash3.flash_attn_func(q, q, q) == 0).all()
    torch.cuda.synchronize()


def test_is_available():
    assert flash3.is_available() and flash3.is_available("cuda:0") and flash3.is_available(0)
