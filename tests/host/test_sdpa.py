"""flash3 as torch's flash attention: registration, and what takes the place of scaled_dot_product_attention's operator.

aten's flash attention operators have no CPU kernels of their own, so ``on_cpu`` gives them flash3's: calls go through
torch's dispatcher, its gradient formulas and its shape inference, as they do on a GPU.
"""

import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from attention_math import attention_math, run, run_float64
from cases import Case, both_masks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import attention as registry
from torch.utils._python_dispatch import TorchDispatchMode

from flash3 import ops, sdpa

aten = torch.ops.aten

# How a (B, S, H, D) tensor comes to scaled_dot_product_attention, which takes (B, H, S, D).
LAYOUTS = {
    "seqlen_first": lambda x: x.transpose(1, 2),
    "heads_first": lambda x: x.transpose(1, 2).contiguous(),
    "packed": lambda x: torch.stack([x, x, x], dim=2)[:, :, 1].transpose(1, 2),
    "odd": lambda x: x.permute(3, 0, 2, 1).contiguous().permute(1, 2, 3, 0),
}
CASES = both_masks([Case(9, 9, 16, num_heads_q=4, num_heads_kv=hk) for hk in (4, 2, 1)])
UNEQUAL = both_masks([Case(5, 9, 8), Case(9, 5, 8, num_heads_q=4), Case(1, 7, 8, batch=1)])


@pytest.fixture
def on_cpu():
    overrides = sdpa._Overrides("CPU")
    yield
    overrides.remove()


@pytest.fixture
def kernels(monkeypatch):
    """As if they were built: activation wants them, and nothing here launches one."""
    monkeypatch.setattr(ops, "kernels_missing", None)
    sdpa.register()
    yield
    registry.restore_flash_attention_impl(_raise_warn=False)


def cuda_kernels():
    """Where the CUDA kernel of each operator was registered, as the dispatcher has it."""
    dumps = (torch._C._dispatch_dump(f"aten::{name}") for name in sdpa._kernels_of_this_torch())
    return [[x for x in dump.splitlines() if x.startswith("CUDA")] for dump in dumps]


def heads_first(function, q_layout="seqlen_first", kv_layout=None):
    """A function of (B, H, S, D) tensors as one of (B, S, H, D) tensors."""

    def attention(q, k, v):
        kv = LAYOUTS[kv_layout or q_layout]
        return function(LAYOUTS[q_layout](q), kv(k), kv(v)).transpose(1, 2)

    return attention


def operator(causal, scale=None):
    return lambda *qkv: aten._scaled_dot_product_flash_attention(*qkv, 0.0, causal, scale=scale)[0]


def assert_all_close(result, expected):
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name))


# Registration


def test_imports_register_nothing():
    code = (
        "import flash3, torch.nn.attention as a\n"
        "assert 'flash3' not in a.list_flash_attention_impls()\n"
        "import flash3.sdpa\n"
        "assert 'flash3' not in a.list_flash_attention_impls()\n"
        "flash3.sdpa.register()\n"
        "assert 'flash3' in a.list_flash_attention_impls()\n"
        "assert a.current_flash_attention_impl() is None\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_activation_replaces_every_kernel_and_restoring_brings_them_back(kernels):
    before = cuda_kernels()
    sdpa.register()  # once more
    assert registry.list_flash_attention_impls().count("flash3") == 1
    for _ in range(2):
        registry.activate_flash_attention_impl("flash3")
        assert registry.current_flash_attention_impl() == "flash3"
        assert len(cuda_kernels()) >= 4
        assert all("flash3/sdpa.py" in active for active, *_ in cuda_kernels())
    registry.restore_flash_attention_impl()
    assert registry.current_flash_attention_impl() is None
    assert cuda_kernels() == before


def test_a_handle_gives_the_kernels_back_when_told_to():
    q = torch.zeros(1, 2, 3, 8)
    handle = sdpa._Overrides("CPU")
    operator(False)(q, q, q)
    handle.remove()
    with pytest.raises(NotImplementedError, match="Could not run"):
        operator(False)(q, q, q)


def test_activation_without_kernels_says_what_is_missing(kernels, monkeypatch):
    before = cuda_kernels()
    monkeypatch.setattr(ops, "kernels_missing", "no kernels, for a reason")
    with pytest.raises(RuntimeError, match="no kernels, for a reason"):
        registry.activate_flash_attention_impl("flash3")
    assert registry.current_flash_attention_impl() is None and cuda_kernels() == before


def test_an_operator_of_another_shape_is_not_replaced(kernels, monkeypatch):
    before = cuda_kernels()
    name = "_flash_attention_backward"
    monkeypatch.setitem(sdpa._KERNELS, name, sdpa._KERNELS[name]._replace(num_positional=13))
    with pytest.raises(RuntimeError, match=f"does not know this operator as torch .*{name}"):
        registry.activate_flash_attention_impl("flash3")
    assert cuda_kernels() == before


def test_a_torch_that_cannot_exchange_its_flash_attention(monkeypatch):
    monkeypatch.delattr(registry, "register_flash_attention_impl")
    with pytest.raises(RuntimeError, match=r"torch 2\.11 and newer"):
        sdpa.register()


# scaled_dot_product_attention


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES + UNEQUAL, ids=str)
def test_sdpa_operator_and_its_gradients(case, layout, on_cpu):
    inputs = case.inputs(torch.float64)
    result = run(heads_first(operator(case.causal, scale=0.3), layout), inputs)
    assert_all_close(result, run_float64(inputs, causal=case.causal, softmax_scale=0.3))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sdpa_operator_returns_what_torch_s_does(case, on_cpu):
    inputs = case.inputs(torch.float32)
    qkv = [x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v)]
    out, lse, *rest = aten._scaled_dot_product_flash_attention(*qkv, 0.0, case.causal)
    right = attention_math(inputs.q, inputs.k, inputs.v, causal=case.causal)
    torch.testing.assert_close((out.transpose(1, 2), lse), right)
    cum_seq_q, cum_seq_k, max_q, max_k, seed, unused, debug_mask = rest
    assert cum_seq_q is None and cum_seq_k is None and (max_q, max_k) == (9, 9)
    assert (seed.shape, unused.shape, debug_mask.shape) == ((2,), (), (0,))


def forward_and_backward(q, k, v, dout):
    forward = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    out, lse, cum_q, cum_k, max_q, max_k, seed, unused, mask = forward
    saved = q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, unused
    grads = aten._scaled_dot_product_flash_attention_backward(dout, *saved)
    return out, lse, seed, unused, mask, *grads


@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize("q_layout", LAYOUTS)
@pytest.mark.parametrize("batch, num_heads_kv", [(2, 4), (2, 2), (1, 4), (0, 4)])
def test_results_are_laid_out_as_torch_infers(batch, num_heads_kv, q_layout, kv_layout, on_cpu):
    case = Case(9, 9, 8, batch=batch, num_heads_q=4, num_heads_kv=num_heads_kv)
    inputs = case.inputs(torch.float32)
    q, dout = LAYOUTS[q_layout](inputs.q), LAYOUTS["packed"](inputs.dout)
    k, v = LAYOUTS[kv_layout](inputs.k), LAYOUTS["heads_first"](inputs.v)
    real = forward_and_backward(q, k, v, dout)
    with FakeTensorMode() as mode:
        fake = forward_and_backward(*(mode.from_tensor(x) for x in (q, k, v, dout)))
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        # What compiled code asserts of a tensor before it uses it.
        torch._C._dynamo.guards.assert_size_stride(x, tuple(y.shape), tuple(y.stride()))


class Recorder(TorchDispatchMode):
    """The operators called, from the outermost."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "layout, heads_kv", [("seqlen_first", 4), ("seqlen_first", 2), ("heads_first", 4)]
)
def test_usual_layouts_cost_no_copy(layout, heads_kv):
    inputs = Case(9, 9, 8, num_heads_q=4, num_heads_kv=heads_kv).inputs(torch.float32)
    q, k, v, dout = (LAYOUTS[layout](x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    with Recorder() as recorder:
        out, lse, *_ = sdpa._sdpa_forward(q, k, v)
        sdpa._sdpa_backward(dout, q, k, v, out, lse, None, None, 9, 9, 0.0, False, None, None)
    calls = [name for name in recorder.names if name.startswith("flash3")]
    assert calls == ["flash3.fwd.default", "flash3.bwd.default"]
    assert not {"aten.copy_.default", "aten.clone.default"} & set(recorder.names)


def test_heads_first_with_grouped_heads_is_one_copy():
    inputs = Case(9, 9, 8, num_heads_q=4, num_heads_kv=2).inputs(torch.float32)
    with Recorder() as recorder:
        sdpa._sdpa_forward(*(LAYOUTS["heads_first"](x) for x in (inputs.q, inputs.k, inputs.v)))
    assert recorder.names.count("aten.copy_.default") == 1


def test_head_dim_that_torch_pads(on_cpu):
    """torch pads to a multiple of 8, and hands over the scale of the head_dim that the user had."""
    inputs = Case(9, 9, 13, causal=True, num_heads_q=4).inputs(torch.float64)

    def padded(*qkv):
        return operator(True, scale=13**-0.5)(*(F.pad(x, (0, 3)) for x in qkv))[..., :13]

    assert_all_close(run(heads_first(padded), inputs), run_float64(inputs, causal=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_torch_s_switch_for_deterministic_algorithms_reaches_the_backward(
    deterministic, on_cpu, monkeypatch
):
    seen, real = [], ops.bwd
    monkeypatch.setattr(ops, "bwd", lambda *args: seen.append(args[-1]) or real(*args))
    torch.use_deterministic_algorithms(deterministic)
    try:
        run(heads_first(operator(False)), CASES[0].inputs(torch.float64))
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [deterministic]


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++"),
            ],
        ),
    ],
)
@pytest.mark.parametrize("layout", ["seqlen_first", "heads_first"])
def test_compile(layout, backend, on_cpu):
    torch._dynamo.reset()
    function = heads_first(lambda *qkv: operator(True)(*qkv) * 2, layout)
    inputs = Case(9, 9, 16, num_heads_q=4, num_heads_kv=2).inputs(torch.float32)
    compiled = run(torch.compile(function, fullgraph=True, backend=backend), inputs)
    assert_all_close(compiled, run(function, inputs))


@pytest.mark.parametrize(
    "error, message, changes",
    [
        (NotImplementedError, "dropout_p: 0.5 ", {"dropout_p": 0.5}),
        (NotImplementedError, "return_debug_mask: True ", {"return_debug_mask": True}),
        (ValueError, "softmax_scale: must be positive", {"scale": 0.0}),
        (TypeError, "must share one dtype", {"key": torch.zeros(2, 4, 9, 16).double()}),
        (ValueError, "must be .batch, heads, seqlen, head_dim", {"value": torch.zeros(9, 16)}),
        (ValueError, "head_dim must be a multiple of 8", {"query": torch.zeros(2, 4, 9, 15)}),
    ],
)
def test_sdpa_operator_checks_its_arguments(error, message, changes, on_cpu):
    arguments = {name: torch.zeros(2, 4, 9, 16) for name in ("query", "key", "value")}
    with pytest.raises(error, match=message):
        aten._scaled_dot_product_flash_attention(**(arguments | changes))
