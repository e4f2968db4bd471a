"""flash3 as torch's flash attention: what torch calls gives the very bits of flash3's own functions.

torch's switch for deterministic algorithms is on where gradients are compared, so that equal means equal.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import HALF_DTYPES, Case, both_masks
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash3
from flash3 import sdpa

BF16 = torch.bfloat16
CASES = both_masks(
    [
        Case(300, 300, d, num_heads_q=hq, num_heads_kv=hk)
        for d, hq, hk in [(64, 4, 4), (128, 4, 4), (128, 4, 2), (40, 6, 1)]
    ]
)
# How a (B, S, H, D) tensor comes to scaled_dot_product_attention, which takes (B, H, S, D).
LAYOUTS = {
    "seqlen_first": lambda x: x.transpose(1, 2),
    "heads_first": lambda x: x.transpose(1, 2).contiguous(),
    "packed": lambda x: torch.stack([x, x, x], dim=2)[:, :, 1].transpose(1, 2),
}


@contextlib.contextmanager
def flash3_active():
    sdpa.register()
    registry.activate_flash_attention_impl("flash3")
    try:
        yield
    finally:
        registry.restore_flash_attention_impl()


@pytest.fixture
def active():
    with flash3_active():
        yield


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def attend(q, k, v, causal, layout="seqlen_first"):
    """torch's function, restricted to its flash backend, on (B, S, H, D) tensors."""
    q, k, v = (LAYOUTS[layout](x) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2)


def step(attention, *tensors):
    """out and gradients; the last of `tensors` is dout."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:-1]]
    out = attention(*leaves)
    return out, *torch.autograd.grad(out, leaves, tensors[-1])


def flash3_step(inputs, causal):
    def attention(q, k, v):
        return flash3.flash_attn_func(q, k, v, causal=causal, deterministic=True)

    return step(attention, inputs.q, inputs.k, inputs.v, inputs.dout)


def assert_equal(results, expected):
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x, y)


def kernel_names(function):
    """What ran on the GPU."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    names = [event.name for event in profile.events() if event.device_type == cuda]
    if not names:
        pytest.skip("the profiler sees no GPU activity here")
    return names


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_flash_attn_func(case, layout, dtype, active, deterministic, flash3_rows):
    flash3_rows(dtype, case.head_dim, case.causal)
    inputs = case.inputs(dtype, "cuda")
    tensors = inputs.q, inputs.k, inputs.v, inputs.dout
    results = step(lambda *qkv: attend(*qkv, case.causal, layout), *tensors)
    assert_equal(results, flash3_step(inputs, case.causal))


def test_other_lengths_of_keys(active, deterministic, flash3_rows):
    flash3_rows(BF16, 64, False)
    inputs = Case(113, 303, num_heads_q=4).inputs(BF16, "cuda")
    results = step(lambda *x: attend(*x, False), inputs.q, inputs.k, inputs.v, inputs.dout)
    assert_equal(results, flash3_step(inputs, False))


@pytest.mark.parametrize("lengths", [(113, 303), (303, 113)], ids=str)
def test_causal_mask_of_torch_aligned_to_the_lower_right(
    lengths, active, deterministic, flash3_rows
):
    from torch.nn.attention.bias import causal_lower_right

    flash3_rows(BF16, 128, True)
    inputs = Case(*lengths, 128).inputs(BF16, "cuda")

    def attention(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            mask = causal_lower_right(*lengths)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    results = step(attention, inputs.q, inputs.k, inputs.v, inputs.dout)
    assert_equal(results, flash3_step(inputs, True))


def test_head_dim_that_torch_pads(active, flash3_rows):
    flash3_rows(BF16, 40, True, passes=("fwd",))
    inputs = Case(200, 200, 37, num_heads_q=4).inputs(BF16, "cuda")
    qkv = inputs.q, inputs.k, inputs.v
    padded = [F.pad(x, (0, 3)) for x in qkv]
    expected = flash3.flash_attn_func(*padded, softmax_scale=37**-0.5, causal=True)[..., :37]
    assert torch.equal(attend(*qkv, True), expected)


@pytest.mark.parametrize("layout", ["seqlen_first", "heads_first"])
@pytest.mark.parametrize("causal", [False, True])
def test_only_kernels_of_flash3_run(causal, layout, active, flash3_rows):
    """One launch forward and three backward: no copy, and nothing is filled for the state of random numbers."""
    flash3_rows(BF16, 64, causal)
    inputs = Case(300, 300, 64, num_heads_q=4, num_heads_kv=4).inputs(BF16, "cuda")
    leaves = [LAYOUTS[layout](x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    dout = LAYOUTS[layout](inputs.dout)

    def forward():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*leaves, is_causal=causal)

    torch.autograd.grad(forward(), leaves, dout)  # the first call loads the kernels
    names = kernel_names(forward)
    assert len(names) == 1 and "flash3" in names[0] and "fwd_kernel" in names[0]
    out = forward()
    names = kernel_names(lambda: torch.autograd.grad(out, leaves, dout))
    assert len(names) == 3 and all("flash3" in name for name in names)


def test_restoring_gives_torch_s_own_back(flash3_rows):
    flash3_rows(BF16, 64, True, passes=("fwd",))
    inputs = Case(300, 300, 64, num_heads_q=4).inputs(BF16, "cuda")

    def forward():
        return attend(inputs.q, inputs.k, inputs.v, True)

    before = forward()
    with flash3_active():
        ours = forward()
    assert torch.equal(ours, flash3.flash_attn_func(inputs.q, inputs.k, inputs.v, causal=True))
    assert torch.equal(forward(), before)
    assert not any("flash3" in name for name in kernel_names(forward))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_compile(heads_kv, layout, backend, active, deterministic, flash3_rows):
    """Compiled code asserts the strides that torch's shape inference told it."""
    flash3_rows(BF16, 64, True)
    if backend == "inductor":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    inputs = Case(300, 300, 64, num_heads_q=4, num_heads_kv=heads_kv).inputs(BF16, "cuda")
    q, k, v, dout = (LAYOUTS[layout](x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))

    def block(q, k, v):
        out = F.scaled_dot_product_attention(q * 2, k, v, is_causal=True, enable_gqa=heads_kv != 4)
        return out * 2

    def run(function):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = function(*leaves)
        return out, *torch.autograd.grad(out, leaves, dout)

    results = run(torch.compile(block, fullgraph=True, backend=backend))
    assert_equal(results, run(block))
    ours = flash3.flash_attn_func(inputs.q * 2, inputs.k, inputs.v, causal=True) * 2
    assert torch.equal(results[0].transpose(1, 2), ours)


def test_dropout_raises(active):
    q = torch.zeros(1, 2, 64, 64, dtype=BF16, device="cuda")
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(NotImplementedError, match=r"dropout_p: 0\.5"),
    ):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


def test_no_host_synchronisation(active, flash3_rows):
    flash3_rows(BF16, 64, True)
    inputs = Case(300, 300, 64, num_heads_q=4).inputs(BF16, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(lambda *x: attend(*x, True), inputs.q, inputs.k, inputs.v, inputs.dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph(active, flash3_rows):
    flash3_rows(BF16, 64, True, passes=("fwd",))
    inputs = Case(300, 300, 64, num_heads_q=4).inputs(BF16, "cuda")
    qkv = inputs.q, inputs.k, inputs.v
    attend(*qkv, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*qkv, True)
    for x in qkv:
        x.normal_()
    graph.replay()
    assert torch.equal(out, flash3.flash_attn_func(*qkv, causal=True))


def test_context_parallel_of_torch_on_one_rank(tmp_path, active, deterministic, flash3_rows):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    if not dist.is_nccl_available() or dist.is_initialized():
        pytest.skip("needs nccl and a process without a process group")
    flash3_rows(BF16, 64, True)
    inputs = Case(256, 256, 64).inputs(BF16, "cuda")
    tensors = inputs.q, inputs.k, inputs.v, inputs.dout
    shards = [LAYOUTS["heads_first"](x) for x in tensors]
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        with (
            context_parallel(mesh, buffers=shards, buffer_seq_dims=[2] * 4),
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        ):
            results = step(
                lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True), *shards
            )
    finally:
        dist.destroy_process_group()
    assert_equal([x.transpose(1, 2) for x in results], flash3_step(inputs, True))


LENGTHS = (100, 17, 128, 64)


def packed_inputs():
    """q, k, v, dout (T, H, D), and the offsets of the sequences."""
    inputs = Case(sum(LENGTHS), sum(LENGTHS), 64, num_heads_q=4, batch=1, num_heads_kv=4)
    x = inputs.inputs(BF16, "cuda")
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    return (x.q[0], x.k[0], x.v[0], x.dout[0]), offsets


def varlen_step(tensors, offsets, causal):
    where = offsets, offsets, max(LENGTHS), max(LENGTHS)
    return step(
        lambda *qkv: flash3.flash_attn_varlen_func(*qkv, *where, causal=causal, deterministic=True),
        *tensors,
    )


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_attn_of_torch(causal, active, deterministic, flash3_rows):
    """Sequences of at most 128: newer versions of torch give longer ones without a mask to cuDNN."""
    from torch.nn.attention.varlen import varlen_attn

    flash3_rows(BF16, 64, causal)
    tensors, offsets = packed_inputs()
    where = offsets, offsets, max(LENGTHS), max(LENGTHS)
    window = {"window_size": (-1, 0)} if causal else {}
    results = step(lambda *qkv: varlen_attn(*qkv, *where, **window), *tensors)
    assert_equal(results, varlen_step(tensors, offsets, causal))


@pytest.mark.parametrize("causal", [False, True])
def test_nested_tensors(causal, active, deterministic, flash3_rows):
    flash3_rows(BF16, 64, causal)
    tensors, offsets = packed_inputs()
    ragged = (
        offsets.long()
    )  # one tensor: it is what tells torch that q, k and v have the same lengths

    def attention(*qkv):
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(
                x, ragged, min_seqlen=min(LENGTHS), max_seqlen=max(LENGTHS)
            ).transpose(1, 2)
            for x in qkv
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return out.transpose(1, 2).values()

    assert_equal(step(attention, *tensors), varlen_step(tensors, offsets, causal))
