"""A build that can be followed: everything goes to a log file, progress to whoever watches.

pip shows nothing of a build unless asked with -v, so progress goes to the terminal itself where there is one, and in
any case as plain lines to standard output.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from pathlib import Path

# What ninja prints before each command that it has finished, see NINJA_STATUS below.
NINJA_STATUS = "flash3-ninja [%f/%t] "
FINISHED = re.compile(r"flash3-ninja \[(\d+)/(\d+)\] (.*)")
OUTPUT = re.compile(r"-o (\S+)")


def open_terminal():
    """The controlling terminal, opened for writing, or None (CI, pipes, services)."""
    try:
        return open("/dev/tty", "w", encoding="utf-8")
    except OSError:
        return None


def announce(line: str) -> None:
    """One line for whoever watches, also from inside pip."""
    print(line, flush=True)
    if not sys.stdout.isatty() and (terminal := open_terminal()):
        with terminal:
            terminal.write(line + "\n")


class BuildLog:
    """While entered, sends standard output and error (children's too) to ``path`` and shows progress lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.phase = "prepare"
        self.start = time.monotonic()

    def __enter__(self) -> BuildLog:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = [os.dup(1), os.dup(2)]
        self._terminal = open_terminal()
        self._stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
        self._log = self.path.open("w", encoding="utf-8")
        read_end, write_end = os.pipe()
        os.dup2(write_end, 1)
        os.dup2(write_end, 2)
        os.close(write_end)
        self._reader = threading.Thread(target=self._read, args=(read_end,), daemon=True)
        self._reader.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        for target, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, target)
            os.close(saved)
        self._reader.join(timeout=10)
        if self._terminal:
            self._terminal.write("\n")
            self._terminal.close()
        self._stdout.close()
        self._log.close()

    def say(self, text: str) -> None:
        """Show one progress line: phase, text, elapsed time."""
        seconds = int(time.monotonic() - self.start)
        line = f"flash3 {self.phase} [{seconds // 60}:{seconds % 60:02d}] {text}"
        self._log.write(line + "\n")
        self._log.flush()
        if self._terminal:
            self._terminal.write(f"\r\033[K{line}")
            self._terminal.flush()
        if not (self._terminal and self._stdout.isatty()):
            with contextlib.suppress(OSError):
                self._stdout.write(line + "\n")
                self._stdout.flush()

    def errors(self, count: int = 15) -> str:
        """The lines of the log that look like the cause of a failure."""
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        found = [
            line
            for line in lines
            if re.search(r"\berror\b|undefined|cannot find|No such file", line)
        ]
        found = [line for line in found if len(line) < 2000]  # commands hold such words too
        return "\n".join((found or lines)[-count:])

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                self._log.write(line)
                if match := FINISHED.match(line):
                    output = OUTPUT.search(match[3])
                    self.say(
                        f"{match[1]}/{match[2]} {Path(output[1]).stem if output else ''}".rstrip()
                    )
