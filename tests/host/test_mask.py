"""The masks of local rows: what a kernel visits and what it masks, against the definition, without a GPU."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = Path(__file__).with_name("mask_check.cpp")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_ranges_of_blocks_are_those_of_the_definition(tmp_path):
    for header in ("cutlass/cutlass.h", "cute/config.hpp"):
        (tmp_path / header).parent.mkdir()
        (tmp_path / header).touch()
    folders = [tmp_path, ROOT / "csrc" / "kernels", ROOT / "csrc" / "launch"]
    command = ["g++", "-std=c++20", "-O1", "-fsanitize=undefined", "-fno-sanitize-recover"]
    command += [*(f"-I{folder}" for folder in folders), CHECK, "-o", tmp_path / "check"]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    result = subprocess.run([tmp_path / "check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout.split()[0]) > 500_000
