"""A plain `pip install .`, with pip's build isolation and one row, into an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from variants import generate

from build_tools import toolchain

ROOT = Path(__file__).parents[2]
ROW = "fwd_bf16_hd64_causal"


def pip_install(target, **settings):
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "-v",
        f"--target={target}",
        str(ROOT),
    ]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        command, env=environ | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def built_rows(target):
    code = "from flash3 import _C; print([row['name'] for row in _C.variants()], _C.build_info()['arch'])"
    environ = os.environ | {"PYTHONPATH": str(target)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=target, capture_output=True, text=True
    )


@pytest.fixture(autouse=True)
def can_compile(toolkit):
    missing = toolchain.missing(toolkit, toolchain.find_torch())
    if missing:
        pytest.skip(missing)


def test_install_from_source_compiles_links_and_imports(tmp_path):
    result = pip_install(tmp_path, FLASH3_VARIANTS=ROW)
    assert result.returncode == 0, result.stdout[-4000:]
    assert "building 1 of" in result.stdout
    assert "the extension loads and holds 1 kernels" in result.stdout
    loaded = built_rows(tmp_path)
    assert loaded.stdout.strip() == f"['{ROW}'] sm_90a", loaded.stderr


def test_install_from_ready_objects_compiles_no_kernel(tmp_path, objects):
    folder = next(iter(objects.values())).parent
    result = pip_install(tmp_path, FLASH3_PREBUILT_KERNELS=str(folder))
    assert result.returncode == 0, result.stdout[-4000:]
    assert f"linking {len(objects)} ready kernels" in result.stdout
    loaded = built_rows(tmp_path)
    rowless = {Path(source).stem for source in generate.ROWLESS}
    rows = [name for name in objects if name not in rowless]
    assert loaded.stdout.strip() == f"{rows} sm_90a", loaded.stderr


def test_install_names_the_log_when_the_compile_fails(tmp_path):
    empty = tmp_path / "cutlass"
    (empty / "include" / "cutlass").mkdir(parents=True)
    (empty / "include" / "cutlass" / "version.h").write_text("#define CUTLASS_MAJOR 0\n")
    result = pip_install(tmp_path / "target", FLASH3_VARIANTS=ROW, FLASH3_CUTLASS_DIR=str(empty))
    assert result.returncode != 0
    assert "the whole log is in" in result.stdout
    assert "No such file" in result.stdout
    assert not (tmp_path / "target").exists()
