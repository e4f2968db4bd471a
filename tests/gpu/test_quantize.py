"""The quantiser kernels against their specification, bit for bit."""

import pytest
import torch

from flash3 import fp8, ops_fp8, reference_fp8
from flash3.reference_fp8 import BLOCK, HEAD, TENSOR

HEAD_DIMS = [16, 32, 48, 64, 80, 96, 112, 128, 160, 176, 192, 224, 240, 256]


def qkv(
    seqlen_q=200, seqlen_k=300, heads=4, heads_kv=2, head_dim=64, dtype=torch.bfloat16, batch=2
):
    """Values of very different size by head, on the GPU."""
    shapes = (seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
    tensors = []
    for seqlen, count in shapes:
        size = 10.0 ** torch.linspace(-2, 2, count, device="cuda").view(count, 1)
        x = torch.randn(batch, seqlen, count, head_dim, device="cuda") * size
        tensors.append(x.to(dtype))
    return tensors


def tables(positions, half, dtype=torch.float32):
    angle = torch.rand(positions, half, device="cuda") * 6.3
    return {"cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}


def assert_same(tensors, cos=None, sin=None, interleaved=False, granularity=BLOCK, block=128,
                hadamard=True, seed=0, transpose_v=True):  # fmt: skip
    arguments = interleaved, granularity, block, hadamard, seed, transpose_v
    ours = ops_fp8.quantize_qkv(*tensors, cos, sin, *arguments)
    on_cpu = (None if x is None else x.cpu() for x in (*tensors, cos, sin))
    right = ops_fp8.quantize_qkv(*on_cpu, *arguments)
    for name, x, expected in zip(("q", "k", "v", "q_descale", "k_descale", "v_descale"), ours, right,
                                 strict=True):  # fmt: skip
        assert x.shape == expected.shape and x.dtype == expected.dtype and x.is_contiguous()
        x = x.cpu()
        if x.dtype == torch.float32:
            assert torch.equal(x, expected), name
            continue
        nan = expected.float().isnan()
        assert torch.equal(x.float().isnan(), nan), name
        different = (x.view(torch.uint8) != expected.view(torch.uint8)) & ~nan
        assert not different.any(), f"{name}: {different.sum()} of {x.numel()} differ"


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("hadamard", [False, True])
def test_blocks(head_dim, dtype, block, hadamard):
    assert_same(qkv(head_dim=head_dim, dtype=dtype), block=block, hadamard=hadamard, seed=head_dim)


@pytest.mark.parametrize("seqlens", [(1, 1), (1, 129), (63, 64), (65, 127), (128, 128), (257, 385)])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("transpose_v", [False, True])
def test_lengths(seqlens, block, transpose_v):
    assert_same(qkv(*seqlens, head_dim=128), block=block, transpose_v=transpose_v)


@pytest.mark.parametrize("granularity", [HEAD, TENSOR])
@pytest.mark.parametrize("head_dim", [48, 64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_scales_of_heads_and_tensors(granularity, head_dim, heads):
    assert_same(qkv(heads=heads[0], heads_kv=heads[1], head_dim=head_dim), granularity=granularity)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "head_dim, half", [(16, 8), (64, 32), (96, 48), (96, 16), (128, 64), (256, 128), (240, 64)]
)
@pytest.mark.parametrize("hadamard", [False, True])
def test_rotary(interleaved, table_dtype, head_dim, half, hadamard):
    given = tables(333, half, table_dtype)
    assert_same(qkv(head_dim=head_dim), **given, interleaved=interleaved, hadamard=hadamard)
    assert_same(
        qkv(head_dim=head_dim), **given, interleaved=interleaved, granularity=HEAD, block=64
    )


@pytest.mark.parametrize("seed", [1, -1, 2**63 - 1, -(2**63), 123456789012345])
def test_seeds(seed):
    assert_same(qkv(64, 64, head_dim=256), seed=seed)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("granularity", [BLOCK, HEAD])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity(hadamard, granularity, bad):
    tensors = qkv(head_dim=128)
    for x in tensors:
        x[0, 70, 1, 5] = bad
        x[1, 3, 0, 77] = bad
        x[1, 3, 0, 78] = -bad
    assert_same(tensors, hadamard=hadamard, granularity=granularity)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-38, 1e-36, 1e-30, 1e36])
def test_extreme_sizes(hadamard, size):
    """bfloat16's subnormal numbers too, which the compiler's fast arithmetic would take for zero."""
    tensors = [(torch.randn_like(x.float()) * size).bfloat16() for x in qkv(head_dim=128)]
    assert_same(tensors, hadamard=hadamard)
    assert_same(tensors, hadamard=hadamard, granularity=TENSOR)


def test_blocks_of_zeros_among_others():
    tensors = qkv(300, 300, head_dim=64)
    for x in tensors:
        x[:, 128:256] = 0
        x[1, :64, 0] = 0
    assert_same(tensors, block=64)


def test_strides():
    tensors = qkv(head_dim=128, heads=4, heads_kv=4)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    packed = torch.cat([x[:, :200] for x in tensors], 3).split(128, 3)
    expanded = [x[:1].expand(2, *x.shape[1:]) for x in tensors]
    odd = [torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in tensors]  # rows at odd addresses
    last = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in tensors]
    for views in (transposed, packed, expanded, odd, last):
        assert_same(list(views))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("granularity", [BLOCK, HEAD, TENSOR])
def test_empty(lengths, granularity):
    assert_same(qkv(*lengths), granularity=granularity)
    assert_same([x[:0] for x in qkv()], granularity=granularity)


def test_many_blocks():
    """More than the grid has CTAs, so that each goes through several."""
    tensors = qkv(3000, 3100, 8, 8, 128, batch=3)
    ours = ops_fp8.quantize_qkv(*tensors, None, None, False, BLOCK, 128, True, 3, True)
    for i, x in enumerate(tensors):
        stored, descale = reference_fp8.quantize(x, 8, BLOCK, 128, seed=3 if i < 2 else None)
        stored = reference_fp8.transpose_values(stored) if i == 2 else stored
        assert torch.equal(ours[i].view(torch.uint8), stored.view(torch.uint8))
        assert torch.equal(ours[3 + i], descale)


def test_what_lies_around_the_tensors_has_no_effect():
    tensors = qkv(130, 190, head_dim=96)
    poisoned = []
    for x in tensors:
        batch, seqlen, heads, head_dim = x.shape
        around = torch.full(
            (batch + 1, seqlen + 130, heads + 1, head_dim + 32), torch.nan, device="cuda"
        )
        around = around.to(x.dtype)
        view = around[:batch, :seqlen, :heads, :head_dim]
        view.copy_(x)
        poisoned.append(view)
    assert_same(poisoned)


def test_runs_under_a_cuda_graph():
    tensors = qkv(head_dim=128)
    fp8.quantize_qkv(*tensors, granularity="head")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fp8.quantize_qkv(*tensors, granularity="head")
    for x in tensors:
        x.mul_(3)
    graph.replay()
    torch.cuda.synchronize()
    direct = fp8.quantize_qkv(*tensors, granularity="head")
    for name in ("q", "k", "v", "q_descale", "k_descale", "v_descale"):
        a, b = (getattr(x, name).view(torch.uint8) for x in (captured, direct))
        assert torch.equal(a, b), name


@pytest.mark.parametrize("arguments, message", [
    ((False, 3, 128, True, 0, True), "granularity"),
    ((False, 0, 96, True, 0, True), "block"),
])  # fmt: skip
def test_the_operator_checks_for_itself(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        ops_fp8.quantize_qkv(*qkv(), None, None, *arguments)
    with pytest.raises(RuntimeError, match="head_dim"):
        ops_fp8.quantize_qkv(*qkv(head_dim=72), None, None, False, 0, 128, True, 0, True)
    with pytest.raises(RuntimeError, match="contiguous"):
        given = tables(300, 64)["cos"][:, ::2]
        ops_fp8.quantize_qkv(*qkv(), given, given, False, 0, 128, True, 0, True)
