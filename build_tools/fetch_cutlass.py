"""CUTLASS headers: where they are, and how to get them.

The kernels include CuTe and CUTLASS headers. They are taken from the ``nvidia-cutlass`` wheel, one pinned release that
is checked by hash, and only its ``include`` folder is unpacked (the wheel's Python code and its dependencies are not
used). ``FLASH3_CUTLASS_DIR`` names a checkout (or any folder with ``include/cutlass``) to be used instead.

    python build_tools/fetch_cutlass.py                  # by pip
    python build_tools/fetch_cutlass.py --wheel FILE     # from a wheel that was brought here by hand
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "4.2.0.0"
SHA256 = "f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6"
INCLUDE_IN_WHEEL = "cutlass_library/source/include/"
ROOT = Path(__file__).resolve().parent.parent
DESTINATION = ROOT / "third_party" / "cutlass"
STAMP = "fetched.txt"  # written last, so that an interrupted unpacking is not mistaken for a complete one


class CutlassError(RuntimeError):
    """The headers are absent or not what was asked for; the message says how to get them."""


def include_dir() -> Path:
    """The CUTLASS include folder. Fetches the pinned headers when they are absent."""
    if not os.environ.get("FLASH3_CUTLASS_DIR") and not is_fetched():
        fetch()
    return expected_dir()


def expected_dir() -> Path:
    """Where include_dir() is or will be, without fetching anything."""
    named = os.environ.get("FLASH3_CUTLASS_DIR")
    if not named:
        return DESTINATION / "include"
    for folder in (Path(named) / "include", Path(named)):
        if (folder / "cutlass" / "version.h").is_file():
            return folder.resolve()
    raise CutlassError(
        f"FLASH3_CUTLASS_DIR={named}: neither it nor its include folder holds cutlass/version.h"
    )


def is_fetched(destination: Path = DESTINATION) -> bool:
    stamp = destination / STAMP
    return stamp.is_file() and stamp.read_text().strip() == f"{VERSION} {SHA256}"


def version(include: Path) -> str:
    """The release that the headers state, for example "4.2.0"; the pinned one if they are still to be fetched."""
    if not (include / "cutlass" / "version.h").is_file():
        return VERSION.rsplit(".", 1)[0]
    text = (include / "cutlass" / "version.h").read_text()
    parts = (
        re.search(rf"#define CUTLASS_{word} +(\d+)", text) for word in ("MAJOR", "MINOR", "PATCH")
    )
    return ".".join(match.group(1) if match else "?" for match in parts)


def fetch(wheel: Path | None = None, destination: Path = DESTINATION) -> None:
    """Download the pinned wheel (unless one is given), check its hash and unpack its headers."""
    with tempfile.TemporaryDirectory() as scratch:
        if wheel is None:
            wheel = download(Path(scratch))
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != SHA256:
            raise CutlassError(f"{wheel.name}: sha256 is {digest}, expected {SHA256}")
        unpack(wheel, destination)


def download(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    command += ["--only-binary=:all:", f"--dest={folder}", f"nvidia-cutlass=={VERSION}"]
    # Inside pip's isolated build PYTHONPATH hides the environment's packages, and pip with them.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_BUILD_TRACKER")}
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        raise CutlassError(
            f"could not download nvidia-cutlass=={VERSION} with pip (its message: "
            f"{(result.stderr or result.stdout).strip()[-400:]}). On a machine without network, bring that wheel and "
            "run `python build_tools/fetch_cutlass.py --wheel FILE`, or set FLASH3_CUTLASS_DIR to a CUTLASS checkout."
        )
    return wheels[0]


def unpack(wheel: Path, destination: Path) -> None:
    shutil.rmtree(destination, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name = entry.filename
            if name.startswith(INCLUDE_IN_WHEEL) and not entry.is_dir():
                target = destination / "include" / name[len(INCLUDE_IN_WHEEL) :]
            elif name.endswith("dist-info/licenses/LICENSE.txt"):
                target = destination / "LICENSE.txt"
            else:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(entry))
    (destination / STAMP).write_text(f"{VERSION} {SHA256}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="unpack this wheel instead of downloading one")
    args = parser.parse_args()
    try:
        if args.wheel:
            fetch(args.wheel)
        include = include_dir()
    except CutlassError as error:
        print(f"flash3: {error}", file=sys.stderr)
        return 1
    print(f"CUTLASS {version(include)} headers: {include}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
