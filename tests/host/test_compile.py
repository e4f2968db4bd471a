"""torch.compile(fullgraph=True) and torch.export of flash_attn_func, on CPU."""

import shutil
import subprocess
import sys

import pytest
import torch
from cases import Case

import flash3
from flash3 import checks

BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++"),
        ],
    ),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def attention(q, k, v):
    """With something to fuse around it, and a use of lse."""
    out, lse = flash3.flash_attn_func(2 * q, k, v, causal=True, return_lse=True, deterministic=True)
    return out.sin() + lse.sin().mean()


def results(function, case):
    inputs = case.inputs(torch.float32)
    tensors = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = function(*tensors)
    return out.detach(), *torch.autograd.grad(out, tensors, inputs.dout)


def test_the_query_of_the_device_is_not_traced(monkeypatch):
    """It is marked as constant by hand (flash3/checks.py): torch must look for that mark."""

    def breaks_a_graph(device):
        torch._dynamo.graph_break()
        return checks.REFERENCE_DTYPES

    monkeypatch.setattr(checks, "_query_accepted_dtypes", breaks_a_graph)
    inputs = Case(9, 12, 16).inputs(torch.float32)
    compiled = torch.compile(flash3.flash_attn_func, fullgraph=True, backend="aot_eager")
    out = compiled(inputs.q, inputs.k, inputs.v)
    torch.testing.assert_close(out, flash3.flash_attn_func(inputs.q, inputs.k, inputs.v))


def test_import_leaves_the_compiler_alone():
    """It would take seconds."""
    code = "import sys, flash3, flash3.distributed; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_with_the_eager_results(backend, dynamic):
    compiled = torch.compile(attention, fullgraph=True, backend=backend, dynamic=dynamic)
    cases = [Case(9, 12, 16, num_heads_q=4, batch=3), Case(17, 33, 16, num_heads_q=4, batch=5)]
    for case in cases if dynamic else cases[:1]:
        for x, y in zip(results(compiled, case), results(attention, case), strict=True):
            torch.testing.assert_close(x, y)


def test_new_lengths_do_not_recompile():
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    # Sizes that are equal by chance would be taken for equal for ever.
    results(compiled, Case(9, 12, 16, num_heads_q=4, batch=3))
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in ((17, 33), (40, 41), (30, 7)):
            results(compiled, Case(*lengths, 16, num_heads_q=4, batch=3))


def test_without_gradients():
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    inputs = Case(9, 12, 16).inputs(torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(inputs.q, inputs.k, inputs.v), attention(inputs.q, inputs.k, inputs.v)
        )


def test_scale_as_an_argument():
    def scaled(q, k, v, scale):
        return flash3.flash_attn_func(q, k, v, scale)

    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    inputs = Case(9, 12, 16).inputs(torch.float32)
    tensors = inputs.q, inputs.k, inputs.v
    for scale in (0.3, 0.5, 1.25):
        torch.testing.assert_close(compiled(*tensors, scale), scaled(*tensors, scale))


def test_one_operator_in_the_graph():
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(attention, fullgraph=True, backend=keep)(
        *(torch.randn(1, 4, 2, 8) for _ in range(3))
    )
    (graph,) = graphs
    targets = [node.target for node in graph.graph.nodes if "flash3" in str(node.target)]
    assert targets == [torch.ops.flash3.fwd.default]


def test_device_check_is_a_constant_of_the_graph(monkeypatch):
    """A capability query inside the trace would break the graph, so its answer must be taken as known."""
    asked = []
    monkeypatch.setattr(
        checks, "_query_accepted_dtypes", lambda device: asked.append(device) or (1, 2)
    )

    def uses_check(x):
        return x + len(checks.accepted_dtypes(torch.device("cuda", 3)))

    x = torch.zeros(2)
    assert torch.compile(uses_check, fullgraph=True, backend="eager")(x).tolist() == [2, 2]
    assert asked == [torch.device("cuda", 3)]


def test_export():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return flash3.flash_attn_func(q, k, v, causal=True)

    inputs = Case(9, 12, 16).inputs(torch.float32)
    tensors = inputs.q, inputs.k, inputs.v
    program = torch.export.export(Attention(), tensors)
    torch.testing.assert_close(program.module()(*tensors), Attention()(*tensors))
