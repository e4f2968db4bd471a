"""FLOP-counter formulas: matrix products over the pairs that a mask lets through."""

import subprocess
import sys

import pytest
import torch
from attention_math import seen_keys
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flash3
import flash3.flops

flash3.flops.register()

SCORES = [
    {},
    {"causal": True},
    {"window_size": (3, 1)},
    {"window_size": (4, 0), "attention_chunk": 5, "causal": True},
]


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def pairs(lengths, arguments):
    return int(seen_keys(*lengths, **arguments).sum())


def leaves(*shapes):
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("arguments", SCORES, ids=str)
def test_dense(arguments, with_sink):
    q, k, v, sink = leaves((2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 24), (4,))
    given = {**arguments, "learnable_sink": sink} if with_sink else arguments
    seen = 2 * 4 * pairs((9, 13), arguments)
    with torch.no_grad():
        assert counted(lambda: flash3.flash_attn_func(q, k, v, **given)) == seen * 2 * (16 + 24)
    both = counted(lambda: flash3.flash_attn_func(q, k, v, **given).sum().backward())
    assert both == seen * 2 * (16 + 24 + 3 * 16 + 2 * 24)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("arguments", SCORES, ids=str)
def test_packed(arguments, used):
    q, k, v = leaves((20, 4, 16), (22, 2, 16), (22, 2, 16))
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32) for x in ((0, 9, 9, 20), (0, 13, 15, 22)))
    lengths = [(9, 13), (0, 2), (11, 7)]
    seqused = {}
    if used:
        seqused = {"seqused_q": torch.tensor((4, 0, 11), dtype=torch.int32)}
        lengths = [(4, 13), (0, 2), (11, 7)]

    def call():
        return flash3.flash_attn_varlen_func(
            q, k, v, ends_q, ends_k, 11, 13, **seqused, **arguments
        )

    seen = 4 * sum(pairs(both, arguments) for both in lengths)
    with torch.no_grad():
        assert counted(call) == seen * 4 * 16
    assert counted(lambda: call().sum().backward()) == seen * 14 * 16


def test_fake_tensors_of_unknown_lengths():
    """Taken to be equally long: nothing can be read."""
    with FakeTensorMode():
        q = torch.empty(20, 4, 16)
        ends = torch.empty(3, dtype=torch.int32)
        flops = counted(lambda: flash3.flash_attn_varlen_func(q, q, q, ends, ends, 10, 10))
    assert flops == 4 * 2 * 10 * 10 * 4 * 16


def test_registering_twice_is_harmless():
    flash3.flops.register()
    flash3.flops.register()


def test_import_leaves_the_counter_alone():
    code = "import sys, flash3; sys.exit('torch.utils.flop_counter' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
