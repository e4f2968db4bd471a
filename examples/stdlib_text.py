"""Real text that every machine has: the Python standard library's sources, as bytes.

Among them are the docstrings and, in pydoc_data, the language reference, so this is prose as well
as code: about 10 MB. Python versions differ in it; on one machine it is always the same.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from gpt import Documents

VOCABULARY = 256  # bytes
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
SEPARATOR = b"\n\x00"  # between files
VALIDATION_SHARE = 20  # every 20th file is held out


def source_files() -> list[Path]:
    """The *.py files of the standard library without its tests, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    kept = [path for path in files if not SKIPPED & set(path.parts)]
    return [root / path for path in sorted(kept, key=lambda path: path.as_posix())]


def read_bytes(files: list[Path]) -> torch.Tensor:
    """The files' bytes, one after the other: (length,) uint8."""
    text = SEPARATOR.join(path.read_bytes() for path in files)
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


@dataclass(frozen=True)
class Text:
    train: torch.Tensor  # (length,) uint8
    validation: torch.Tensor  # (length,) uint8, other files


def load(device: torch.device) -> Text:
    """Raises FileNotFoundError on a Python whose library has no sources (a zipped one)."""
    files = source_files()
    if len(files) < VALIDATION_SHARE:
        raise FileNotFoundError(f"no *.py files in {sysconfig.get_path('stdlib')}")
    validation = files[VALIDATION_SHARE - 1 :: VALIDATION_SHARE]
    held_out = set(validation)
    train = [path for path in files if path not in held_out]
    return Text(read_bytes(train).to(device), read_bytes(validation).to(device))


def windows(
    text: torch.Tensor, batch: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows as (inputs, targets), both (batch, context) int64; the next byte is the target.

    generator: on the CPU, so that a seed draws the same windows on every device.
    """
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    positions = (starts + torch.arange(context + 1)).to(text.device)
    chunk = text[positions].long()
    return chunk[:, :-1], chunk[:, 1:]


def documents(tokens: torch.Tensor) -> Documents:
    """The files, and parts of files, of windows (b, s): a row starts with one, the separator ends one.

    Waits for the device: it has to be known how many there are.
    """
    first = torch.ones_like(tokens, dtype=torch.bool)
    first[:, 1:] = tokens[:, :-1] == SEPARATOR[-1]
    starts = first.flatten().nonzero().flatten()
    number = first.flatten().cumsum(0) - 1
    positions = torch.arange(tokens.numel(), device=tokens.device) - starts[number]
    ends = F.pad(starts, (0, 1), value=tokens.numel()).int()
    return Documents(ends, number.view_as(tokens), positions.view_as(tokens))
