"""The model of attention over several GPUs: its bytes are those that the functions send, its tables the document's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import ThreadCommunicator, run_threads

from benchmarks import context_model
from benchmarks.context_model import METHODS, NETWORKS, SPEED, Problem
from flash3 import distributed

FUNCTIONS = {
    "ring": distributed.ring_attn_func,
    "all-gather": distributed.allgather_attn_func,
    "Ulysses": distributed.ulysses_attn_func,
}
DOCUMENT = Path(__file__).parents[2] / "docs" / "distributed.md"


class CountingCommunicator(ThreadCommunicator):
    """Counts the bytes that leave this rank."""

    sent = 0

    def rotate(self, tensors):
        self.sent += sum(x.nbytes for x in tensors)
        return super().rotate(tensors)

    def gather(self, x):
        self.sent += (self.size - 1) * x.nbytes
        return super().gather(x)

    def exchange(self, x):
        self.sent += x.nbytes * (self.size - 1) // self.size
        return super().exchange(x)

    def check_same(self, what, device):
        pass


def bytes_sent(function, problem: Problem) -> list[dict[str, int]]:
    """Of every rank, forward and backward."""

    def on_a_rank(comm):
        comm = CountingCommunicator(comm.rank, comm.size, comm._boxes)
        q, k, v = (
            torch.randn(problem.batch, problem.local, heads, problem.head_dim)
            .bfloat16()
            .requires_grad_()
            for heads in (problem.heads, problem.heads_kv, problem.heads_kv)
        )
        out = function(q, k, v, comm, causal=True)
        forward = comm.sent
        out.backward(torch.ones_like(out))
        return {"forward": forward, "backward": comm.sent - forward}

    return run_threads(problem.ranks, on_a_rank)


@pytest.mark.parametrize("heads_kv", [8, 4, 1])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", METHODS)
def test_bytes_are_those_that_travel(name, ranks, heads_kv):
    problem = Problem(ranks, local=4, heads=8, heads_kv=heads_kv, head_dim=8, batch=2)
    expected = {d: METHODS[name](problem, d).bytes for d in SPEED}
    assert bytes_sent(FUNCTIONS[name], problem) == [expected] * ranks


@pytest.mark.parametrize("direction", SPEED)
@pytest.mark.parametrize("name", METHODS)
def test_all_kernels_together_are_the_whole_attention(name, direction):
    problem = Problem(ranks=4, local=1000, heads_kv=8)
    expected = problem.flops(direction) / SPEED[direction]
    assert METHODS[name](problem, direction).kernels == pytest.approx(expected)
    triangle = 4 * 32 * 128 * 4000**2 / 2 * (1 if direction == "forward" else 2.5)
    assert problem.flops(direction) * problem.ranks == pytest.approx(triangle)


@pytest.mark.parametrize("direction", SPEED)
@pytest.mark.parametrize("network", NETWORKS)
def test_smallest_length_is_where_communication_begins_to_hide(network, direction):
    bandwidth = NETWORKS[network]
    for name in ("ring", "all-gather"):
        length = context_model.smallest_local(name, Problem(8, 8192), direction, bandwidth)
        for local, hidden in ((length, True), (length - 2, False)):
            found = METHODS[name](Problem(8, local), direction)
            assert (max(found.beside) / bandwidth <= found.kernel * (1 + 1e-9)) is hidden
    length = context_model.smallest_local("Ulysses", Problem(8, 8192), direction, bandwidth)
    found = METHODS["Ulysses"](Problem(8, length), direction)
    assert found.exposed / bandwidth == pytest.approx(0.1 * found.kernel, rel=1e-2)


def test_formula_of_the_document():
    """Ring, forward: s = 2 (heads_kv / heads) (speed / bandwidth)."""
    for network, length in (("NVLink", 2667), ("InfiniBand", 24000)):
        found = context_model.smallest_local("ring", Problem(8, 512), "forward", NETWORKS[network])
        assert found == length


def test_tables_of_the_document_are_those_of_the_model():
    text = DOCUMENT.read_text()
    for name, block in context_model.blocks(8192).items():
        assert f"<!-- bench:{name} -->\n{block}\n<!-- /bench:{name} -->" in text, (
            "python -m benchmarks.context_model --write docs/distributed.md"
        )


def test_command_writes_the_blocks_of_a_file(tmp_path, capsys):
    file = tmp_path / "page.md"
    file.write_text("<!-- bench:context_length --><!-- /bench:context_length -->\n")
    assert context_model.main(["--write", str(file)]) == 0
    assert "| ring, 32/8 " in file.read_text() and capsys.readouterr().out == ""
    assert context_model.main(["--local", "4096"]) == 0
    assert capsys.readouterr().out.count("kernels, ms") == 2
