"""The examples of README.md's features run as they stand, on CPU."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[2] / "README.md"
SECTION = "### Packed documents, windows, soft capping, sinks"


def blocks():
    """The Python blocks of the section, with the words in bold before each."""
    text = README.read_text().split(SECTION)[1].split("\n### ")[0]
    return re.findall(
        r"\*\*([^*]+)\*\*[^`]*?(?:`[^`\n]+`[^`]*?)*```python\n(.*?)```", text, re.DOTALL
    )


def test_every_feature_has_a_block():
    assert len(blocks()) == README.read_text().split(SECTION)[1].split("\n### ")[0].count(
        "```python"
    )


@pytest.mark.parametrize("code", [code for _, code in blocks()], ids=[name for name, _ in blocks()])
def test_a_block_runs(code):
    q, k, v = (torch.randn(2, 512, h, 64, requires_grad=True) for h in (4, 2, 2))
    import flash3

    names = {"torch": torch, "flash3": flash3, "q": q, "k": k, "v": v}
    exec(compile(code, str(README), "exec"), names)
    if "out" in names:
        assert names["out"].isfinite().all()
    if "sink" in names:
        assert names["sink"].grad.shape == (4,)
    if "counter" in names:
        assert names["counter"].get_total_flops() > 0
