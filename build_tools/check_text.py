"""Whitespace, line ends and size of text files: python build_tools/check_text.py [--fix] FILE...

Without files, looks at every file that git tracks or would track.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 1_000_000
CONFLICT = re.compile(r"^(<{7} |>{7} |={7}$)", re.MULTILINE)


def cleaned(text: str) -> str:
    """The text with no trailing blanks, Unix line ends and one newline at its end."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    return "\n".join(lines).rstrip("\n") + "\n" if any(lines) else ""


def faults(path: Path, fix: bool) -> list[str]:
    found = []
    if path.stat().st_size > MAX_BYTES:
        found.append(f"is larger than {MAX_BYTES} bytes")
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:  # an image or another binary file
        return found
    if CONFLICT.search(text):
        found.append("holds a merge conflict marker")
    if path.suffix != ".json" and cleaned(text) != text:  # JSON here is written by programs
        found.append("has stray whitespace" + (", corrected" if fix else ""))
        if fix:
            path.write_bytes(cleaned(text).encode())
    return found


def repository_files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--fix", action="store_true", help="correct whitespace in place")
    args = parser.parse_args()
    status = 0
    for path in args.files or repository_files():
        for fault in faults(path, args.fix):
            print(f"{path}: {fault}")
            status = 1
    return status


if __name__ == "__main__":
    raise SystemExit(main())
