"""flash3 against float64, beside the error that torch's own attention makes in the same dtype."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import flash3

RESULTS = ("out", "lse", "dq", "dk", "dv")
FACTOR = 2.0
# For values that torch gets exactly right by luck: roundings of the result, and of the scores.
FLOOR_ULPS = 0.5
LSE_FLOOR = 1e-4


@dataclass(frozen=True)
class Case:
    """A shape, seqlen_q <= seqlen_k; causal is aligned to the bottom right."""

    dtype: torch.dtype
    head_dim: int
    causal: bool
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int

    def __str__(self) -> str:
        dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        mask = "causal" if self.causal else "full"
        return (
            f"{dtype} d{self.head_dim} {mask} b{self.batch} "
            f"{self.seqlen_q}x{self.seqlen_k} heads {self.heads}/{self.heads_kv}"
        )


SHAPES = (  # head_dim, batch, seqlen_q, seqlen_k, heads, heads_kv: round, odd, GQA, MQA
    (64, 2, 256, 256, 4, 4),
    (64, 1, 77, 333, 6, 2),
    (128, 2, 200, 200, 4, 1),
    (128, 1, 513, 513, 2, 2),
)
CASES = [
    Case(dtype, head_dim, causal, *rest)
    for dtype in (torch.bfloat16, torch.float16)
    for head_dim, *rest in SHAPES
    for causal in (False, True)
]


def visible(case: Case, device: torch.device) -> torch.Tensor:
    """(seqlen_q, seqlen_k) bool: which key each query sees."""
    everything = torch.ones(case.seqlen_q, case.seqlen_k, dtype=torch.bool, device=device)
    return everything.tril(case.seqlen_k - case.seqlen_q) if case.causal else everything


def log_sum_exp(q, k, mask) -> torch.Tensor:
    """(b, heads, seqlen_q) from q, k (b, heads, s, d): scores in their dtype, the sum in float32."""
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, -math.inf)
    return scores.logsumexp(-1) if q.dtype == torch.float64 else scores.float().logsumexp(-1)


def textbook(q, k, v, mask):
    """The definition, with the whole score matrix: float64 inputs give the right answer."""
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def torch_sdpa(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_torch(attention, inputs, dout, mask) -> dict[str, torch.Tensor]:
    """Results of attention(q, k, v, mask) over (b, heads, s, d), given and returned as flash3's."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out = attention(q, k, v, mask).transpose(1, 2)
    gradients = torch.autograd.grad(out, leaves, dout)
    with torch.no_grad():
        lse = log_sum_exp(q, k, mask)
    return dict(zip(RESULTS, (out.detach(), lse, *gradients), strict=True))


def by_flash3(case: Case, inputs, dout) -> dict[str, torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = flash3.flash_attn_func(*leaves, causal=case.causal, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    return dict(zip(RESULTS, (out.detach(), lse.detach(), *gradients), strict=True))


@dataclass(frozen=True)
class Errors:
    """Largest absolute errors by result, and whether flash3's are all within the rule."""

    flash3: dict[str, float]
    torch: dict[str, float]
    passed: bool


def compare(case: Case, device: torch.device) -> Errors:
    """The rule, as in tests/: error <= 2 * torch's error in the same dtype + a floor."""
    generator = torch.Generator().manual_seed(0)

    def draw(seqlen: int, heads: int) -> torch.Tensor:
        shape = (case.batch, seqlen, heads, case.head_dim)
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    inputs = (
        draw(case.seqlen_q, case.heads),
        draw(case.seqlen_k, case.heads_kv),
        draw(case.seqlen_k, case.heads_kv),
    )
    dout, mask = draw(case.seqlen_q, case.heads), visible(case, device)
    exact = by_torch(textbook, [x.double() for x in inputs], dout.double(), mask)

    def errors(results: dict[str, torch.Tensor]) -> dict[str, float]:
        return {name: (results[name] - exact[name]).abs().max().item() for name in RESULTS}

    ours = errors(by_flash3(case, inputs, dout))
    torchs = errors(by_torch(torch_sdpa, inputs, dout, mask))
    ulp = torch.finfo(case.dtype).eps
    floor = {name: FLOOR_ULPS * ulp * exact[name].abs().max().item() for name in RESULTS}
    floor["lse"] = LSE_FLOOR
    passed = all(ours[name] <= FACTOR * torchs[name] + floor[name] for name in RESULTS)
    return Errors(ours, torchs, passed)


def table(device: torch.device) -> tuple[str, bool]:
    """One line per case, "flash3's error / torch's error", and whether all of them passed."""
    lines = [f"{'largest error: flash3 / torch':40}" + "".join(f"{name:>20}" for name in RESULTS)]
    good = True
    for case in CASES:
        found = compare(case, device)
        good &= found.passed
        pairs = (f"{found.flash3[name]:.1e} / {found.torch[name]:.1e}" for name in RESULTS)
        verdict = "  ok" if found.passed else "  WRONG"
        lines.append(f"{case!s:40}" + "".join(f"{pair:>20}" for pair in pairs) + verdict)
    return "\n".join(lines), good
