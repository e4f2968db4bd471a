"""flash3 beside other kernels: its error against float64 is held to twice theirs (tolerance.py), on the same inputs."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from attention_math import Result, attention_math, run, run_flash3, run_float64
from cases import HALF_DTYPES, Case, both_masks
from tolerance import assert_as_accurate
from torch.nn.attention import SDPBackend, sdpa_kernel

# torch's causal mask is top-left aligned: with equal lengths it is ours.
EQUAL_LENGTHS = both_masks(
    [
        Case(s, s, d, num_heads_q=hq, num_heads_kv=hk)
        for s, d, hq, hk in [
            (65, 64, 4, 4),
            (257, 128, 4, 2),
            (1000, 64, 6, 2),
            (1024, 128, 4, 4),
            (190, 40, 4, 4),
        ]
    ]
)
OTHER_LENGTHS = [Case(113, 303, 64, num_heads_q=4), Case(303, 113, 128, num_heads_q=4)]


def sdpa(backends, causal: bool):
    """torch's scaled_dot_product_attention in our layout; key/value heads are repeated, as not every backend groups."""

    def attention(q, k, v):
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
        with sdpa_kernel(backends):
            out = F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal
            )
        return out.transpose(1, 2)

    return attention


def compare(case: Case, dtype, peer, backward: bool = True) -> None:
    inputs = case.inputs(dtype, "cuda")
    result = run_flash3(inputs, backward=backward, causal=case.causal)
    right = run_float64(inputs, backward=backward, causal=case.causal)
    assert_as_accurate(result, right, run(peer, inputs, backward=backward), inputs)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("case", [*EQUAL_LENGTHS, *OTHER_LENGTHS], ids=str)
def test_flash_attention_2_of_torch(case, dtype, flash3_rows):
    flash3_rows(dtype, case.head_dim, case.causal)
    compare(case, dtype, sdpa(SDPBackend.FLASH_ATTENTION, case.causal))


@pytest.mark.parametrize("case", [*EQUAL_LENGTHS, *OTHER_LENGTHS], ids=str)
def test_sdpa_as_torch_chooses_it(case, flash3_rows):
    flash3_rows(torch.bfloat16, case.head_dim, case.causal)
    backends = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    compare(case, torch.bfloat16, sdpa(backends, case.causal))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [(113, 303), (303, 113), (1, 500), (512, 700)], ids=str)
def test_flash_attention_2_operator_with_bottom_right_mask(lengths, head_dim, flash3_rows):
    """aten's operator takes our layout and aligns the causal mask as we do; it writes +inf where a row sees no key."""
    flash3_rows(torch.bfloat16, head_dim, True, passes=("fwd",))
    case = Case(*lengths, head_dim, causal=True)
    inputs = case.inputs(torch.bfloat16, "cuda")
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        inputs.q, inputs.k, inputs.v, None, None, *lengths, 0.0, True, False
    )
    lse = lse.masked_fill(lse.isposinf(), -math.inf)
    result = run_flash3(inputs, backward=False, causal=True)
    right = Result(
        *attention_math(inputs.q.double(), inputs.k.double(), inputs.v.double(), causal=True)
    )
    assert_as_accurate(result, right, Result(out, lse), inputs)


@pytest.mark.parametrize("module", ["flash_attn", "flash_attn_interface", "fa3_fwd_interface"])
@pytest.mark.parametrize(
    "case", both_masks([Case(300, 417, 64, num_heads_q=6), Case(417, 300, 128)]), ids=str
)
def test_installed_packages(case, module, flash3_rows):
    """FlashAttention-2 and the official FlashAttention-3, where they are installed."""
    try:
        theirs = importlib.import_module(module).flash_attn_func
    except ImportError as error:
        pytest.skip(f"{module} is not installed: {error}")
    flash3_rows(torch.bfloat16, case.head_dim, case.causal)

    def peer(q, k, v):
        result = theirs(q, k, v, causal=case.causal)
        return result[0] if isinstance(result, tuple) else result

    compare(case, torch.bfloat16, peer, backward=module != "fa3_fwd_interface")
