"""Choose the Python that `make` works with and bring it what the project needs. Prints its path.

    python3 build_tools/environment.py --torch torch==X.Y.Z --extras build,test

The interpreter that runs this file is used if it has a torch that will do. Otherwise it makes .venv in the repository
and installs the torch that was named there. What is installed already is left as it is, so this works offline where
nothing is missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
HAS_TORCH = "import re, torch; assert tuple(map(int, re.findall(r'\\d+', torch.__version__)[:2])) >= (2, 10)"


def note(line: str) -> None:
    """Standard output carries the answer alone."""
    print(f"flash3: {line}", file=sys.stderr, flush=True)


def runs(python: str | Path, code: str) -> bool:
    return subprocess.run([str(python), "-c", code], capture_output=True).returncode == 0


def pip_install(python: str | Path, requirements: list[str]) -> bool:
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    return subprocess.run(command + requirements, stdout=sys.stderr).returncode == 0


def find_python(torch: str) -> Path | None:
    """An interpreter with torch: this one, .venv, or a new .venv with the ``torch`` requirement; None if that fails."""
    inside = VENV / "bin" / "python"
    for python in (Path(sys.executable), inside):
        if python.exists() and runs(python, HAS_TORCH):
            return python
    if not inside.exists():
        note(f"{sys.executable} has no torch: making .venv")
        if subprocess.run([sys.executable, "-m", "venv", str(VENV)], stdout=sys.stderr).returncode:
            note(
                "could not make a venv (on Debian and Ubuntu: apt install python3-venv), or name one with PYTHON="
            )
            return None
    note(f"installing {torch} into .venv; this takes a few minutes")
    if not pip_install(inside, [torch, "setuptools", "wheel"]) or not runs(inside, HAS_TORCH):
        note(f"could not install {torch}; name a Python that has torch with PYTHON=")
        return None
    return inside


def extras(names: list[str]) -> list[str]:
    """The requirements that pyproject.toml lists under these optional dependencies."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [
        requirement for name in names for requirement in project["optional-dependencies"][name]
    ]
    return list(dict.fromkeys(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--torch", required=True, help="requirement to install where there is no torch"
    )
    parser.add_argument("--extras", default="", help="optional dependencies, separated by commas")
    args = parser.parse_args()
    if sys.version_info < (3, 10):  # noqa: UP036  whatever python is on PATH runs this file
        note(
            f"Python 3.10 or newer is needed, {sys.executable} is {sys.version.split()[0]}; name one with PYTHON="
        )
        return 1
    python = find_python(args.torch)
    if python is None:
        return 1
    requirements = extras([name for name in args.extras.split(",") if name])
    if requirements and not pip_install(python, requirements):
        note(f"could not install all of {', '.join(requirements)}; going on with what is there")
    print(python)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
