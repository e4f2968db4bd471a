"""Every bad argument raises before a kernel is reached, and the message names it."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flash3
from flash3 import checks

SHAPE = (2, 16, 4, 64)


def qkv(q_shape=SHAPE, k_shape=SHAPE, v_shape=None, *, dtype=torch.bfloat16, device="cpu"):
    shapes = q_shape, k_shape, v_shape or k_shape
    return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]


def assert_raises(error, *message_parts, tensors=None, **arguments):
    with pytest.raises(error) as caught:
        flash3.flash_attn_func(*(tensors or qkv()), **arguments)
    assert type(caught.value) is error, f"raised the subclass {type(caught.value)}"
    for part in message_parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("position, name", list(enumerate("qkv")))
@pytest.mark.parametrize("value", [None, 3.0, [[1.0]], "q"])
def test_not_a_tensor(position, name, value):
    tensors = qkv()
    tensors[position] = value
    assert_raises(TypeError, f"{name}:", type(value).__name__, tensors=tensors)


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_mixed_dtypes(position, dtype):
    tensors = qkv()
    tensors[position] = tensors[position].to(dtype)
    assert_raises(TypeError, "one dtype", str(dtype), "torch.bfloat16", tensors=tensors)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool, torch.float8_e5m2])
def test_unusable_dtypes(dtype):
    assert_raises(TypeError, str(dtype), "bfloat16", tensors=qkv(dtype=dtype))


@pytest.mark.parametrize("position", range(3))
def test_mixed_devices(position):
    tensors = qkv()
    tensors[position] = tensors[position].to("meta")
    assert_raises(ValueError, "one device", "cpu", "meta", tensors=tensors)


def test_sparse_tensors():
    assert_raises(TypeError, "dense", "sparse_coo", tensors=[x.to_sparse() for x in qkv()])


@pytest.mark.parametrize("head_dim", [1, 7, 12, 100, 260, 264, 512])
def test_head_dim_out_of_range(head_dim):
    shape = (1, 4, 2, head_dim)
    assert_raises(
        ValueError, "q: head_dim", "multiple of 8", "256", str(head_dim), tensors=qkv(shape, shape)
    )


def test_head_dim_zero():
    shape = (1, 4, 2, 0)
    assert_raises(ValueError, "q: head_dim", "got 0", tensors=qkv(shape, shape))


@pytest.mark.parametrize("heads", [(4, 3), (3, 4), (2, 4), (0, 1), (1, 0), (0, 0)])
def test_heads_that_do_not_divide(heads):
    shapes = [(1, 4, h, 64) for h in heads]
    assert_raises(ValueError, "heads", f"{heads[0]} and {heads[1]}", tensors=qkv(*shapes))


@pytest.mark.parametrize("position, name", list(enumerate("qkv")))
@pytest.mark.parametrize("shape", [(16, 4, 64), (64,), (1, 2, 16, 4, 64)])
def test_wrong_number_of_dimensions(position, name, shape):
    shapes = [SHAPE] * 3
    shapes[position] = shape
    assert_raises(
        ValueError, f"{name}:", "(batch, seqlen, heads, head_dim)", str(shape), tensors=qkv(*shapes)
    )


@pytest.mark.parametrize("k_shape", [(1, 16, 4, 64), (3, 16, 4, 64), (2, 16, 4, 32)])
def test_k_does_not_fit_q(k_shape):
    assert_raises(ValueError, "k:", str(k_shape), tensors=qkv(k_shape=k_shape))


@pytest.mark.parametrize(
    "v_shape", [(1, 16, 4, 64), (2, 15, 4, 64), (2, 16, 2, 64), (2, 15, 4, 32)]
)
def test_v_does_not_fit_k(v_shape):
    assert_raises(ValueError, "v:", str(v_shape), str(SHAPE), tensors=qkv(v_shape=v_shape))


@pytest.mark.parametrize("head_dim", [4, 0, 264])
def test_bad_head_dim_of_v(head_dim):
    shape = (2, 16, 4, head_dim)
    assert_raises(
        ValueError, "v: head_dim", "multiple of 8", str(head_dim), tensors=qkv(v_shape=shape)
    )


@pytest.mark.parametrize("scale", [0, 0.0, -1.0, math.inf, -math.inf, math.nan, 1e39, 1e-46])
def test_scale_out_of_range(scale):
    assert_raises(ValueError, "softmax_scale:", str(scale), softmax_scale=scale)


@pytest.mark.parametrize("scale", ["1", True, torch.ones(()), 1j])
def test_scale_of_wrong_type(scale):
    assert_raises(TypeError, "softmax_scale:", type(scale).__name__, softmax_scale=scale)


@pytest.mark.parametrize("name", ["causal", "deterministic"])
@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_flags_are_bools(name, value):
    assert_raises(TypeError, f"{name}:", repr(value), **{name: value})


@pytest.mark.parametrize(
    "name, value",
    [
        ("qv", torch.zeros(2, 16, 4, 64)),
        ("q_descale", torch.ones(2, 4)),
        ("k_descale", torch.ones(2, 4)),
        ("v_descale", 1.0),
        ("num_splits", 2),
        ("num_splits", -1),
        ("pack_gqa", True),
        ("sm_margin", 4),
    ],
)
def test_unsupported_parameters(name, value):
    assert_raises(NotImplementedError, f"{name}:", **{name: value})


class TestCudaRules:
    """Checks of CUDA tensors, on fake ones: they carry dtype, shape and device, and no data. Making one asks torch
    about CUDA, so the tensors come first and the pretended GPU after."""

    @pytest.fixture(autouse=True)
    def fake_tensors(self):
        checks._query_accepted_dtypes.cache_clear()
        with FakeTensorMode():
            yield
        checks._query_accepted_dtypes.cache_clear()

    def pretend_gpu(self, monkeypatch, capability, name) -> list:
        """Returns the list of the devices whose capability will be asked for."""
        asked = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_capability",
            lambda device=None: asked.append(device) or capability,
        )
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        return asked

    @pytest.mark.parametrize("requires_grad", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_only_half_precision(self, dtype, requires_grad, monkeypatch):
        tensors = [x.requires_grad_(requires_grad) for x in qkv(dtype=dtype, device="cuda")]
        self.pretend_gpu(monkeypatch, (9, 0), "NVIDIA H200")
        assert_raises(
            TypeError, f"{dtype} is not supported on cuda", "float16, bfloat16", tensors=tensors
        )

    @pytest.mark.parametrize(
        "capability, name", [((8, 0), "NVIDIA A100"), ((10, 0), "NVIDIA B200")]
    )
    def test_other_gpus_are_named(self, capability, name, monkeypatch):
        tensors = qkv(device="cuda")
        self.pretend_gpu(monkeypatch, capability, name)
        version = f"{capability[0]}.{capability[1]}"
        assert_raises(RuntimeError, "Hopper", f"cuda:0 is {name}", version, tensors=tensors)
        assert not flash3.is_available()

    def test_capability_is_asked_once_per_device(self, monkeypatch):
        tensors = qkv(device="cuda")
        asked = self.pretend_gpu(monkeypatch, (9, 0), "NVIDIA H100")
        for _ in range(3):
            checks.check_tensors(*tensors)
        assert asked == [torch.device("cuda:0")]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_hopper_tensors_pass(self, dtype, monkeypatch):
        tensors = qkv(dtype=dtype, device="cuda")
        self.pretend_gpu(monkeypatch, (9, 0), "NVIDIA H100")
        assert checks.check_tensors(*tensors) == 64


def test_other_device_types():
    with pytest.raises(NotImplementedError, match="device xpu"):
        checks.accepted_dtypes(torch.device("xpu"))


def test_nothing_is_available_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not flash3.is_available()
