"""Build kernel objects: rows of the variant table to ``.o`` files that hold no torch and no Python symbol.

    python build_tools/kernels.py --variants core --out build/kernels -j 2

The folder afterwards holds, for each row, the object, its depfile, its command and the compiler's log, and
``generated/`` with the sources. ``FLASH3_PREBUILT_KERNELS`` names such a folder to ``pip install``. A row whose command
and sources are unchanged is not compiled again.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "csrc")]  # the file also runs as a script

from variants import generate  # noqa: E402

from build_tools import fetch_cutlass, flags, ptxas, toolchain  # noqa: E402
from build_tools.jobs import max_jobs  # noqa: E402


class BuildError(RuntimeError):
    """A row did not compile; the message names its log."""


def build(
    rows: Sequence,
    out: Path,
    toolkit: toolchain.Toolkit,
    jobs: int,
    say: Callable[[str], None],
) -> list[Path]:
    """Compile ``rows`` into ``out`` with ``jobs`` compilers at once; the objects in the order of the rows.

    After them come those of the kernels that have no row.

    ``say`` receives a line for each row done: phase, n/N, elapsed time and what ptxas reports. Raises BuildError when a
    row does not compile; compilers that already run are left to finish.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds in one folder would write the same objects
        return build_locked(rows, out, toolkit, jobs, say)


def build_locked(
    rows: Sequence, out: Path, toolkit: toolchain.Toolkit, jobs: int, say
) -> list[Path]:
    cutlass = fetch_cutlass.include_dir()
    sources = generate.generate(rows, out / "generated")
    sources += [ROOT / source for source in generate.ROWLESS]
    objects = {source: out / f"{source.stem}.o" for source in sources}
    commands = {
        s: flags.kernel_command(toolkit.nvcc, cutlass, s.resolve(), o.resolve())
        for s, o in objects.items()
    }
    stale = [source for source in sources if not is_current(objects[source], commands[source])]
    say(
        f"flash3 kernels: {len(sources)} files, {len(stale)} to compile, {jobs} at a time, {toolkit}, in {out}"
    )

    start, done = time.monotonic(), 0
    with ThreadPoolExecutor(jobs) as pool:
        waiting: dict[Future, Path] = {
            pool.submit(compile_one, commands[s], objects[s]): s for s in stale
        }
        while waiting:
            finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                source = waiting.pop(future)
                seconds, failed = future.result()
                done += 1
                log = objects[source].with_suffix(".log")
                outcome = "FAILED" if failed else ptxas.summary(ptxas.read(log))
                say(
                    f"kernels [{clock(start)}] {done}/{len(stale)} {source.stem} ({seconds:.0f} s): {outcome}"
                )
                if failed:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise BuildError(
                        f"{source.stem} did not compile, see {log}\n{first_errors(log)}"
                    )
    return [objects[source] for source in sources]


def compile_one(command: list[str], output: Path) -> tuple[float, bool]:
    """Run one compiler; its messages go to the log. Returns the seconds it took and whether it failed."""
    stamp = output.with_suffix(".cmd")
    stamp.unlink(missing_ok=True)
    start = time.monotonic()
    with output.with_suffix(".log").open("w") as log:
        failed = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode != 0
    if failed:
        output.unlink(missing_ok=True)
    else:
        stamp.write_text(
            shlex.join(command)
        )  # written last: an interrupted compile leaves no stamp
    return time.monotonic() - start, failed


def is_current(output: Path, command: list[str]) -> bool:
    """Whether ``output`` was made by this command from files that have not changed since."""
    stamp, depfile = output.with_suffix(".cmd"), output.with_suffix(".d")
    if not (output.is_file() and stamp.is_file() and depfile.is_file()):
        return False
    if stamp.read_text() != shlex.join(command):
        return False
    made = output.stat().st_mtime_ns
    try:
        return all(os.stat(path).st_mtime_ns <= made for path in dependencies(depfile))
    except OSError:  # a header that was used is gone
        return False


def dependencies(depfile: Path) -> list[str]:
    """The files that a make-style depfile lists after its target."""
    text = depfile.read_text().replace("\\\n", " ")
    _, _, listed = text.partition(": ")
    return [path.replace("\0", " ") for path in listed.replace("\\ ", "\0").split()]


def first_errors(log: Path, count: int = 12) -> str:
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
    return "\n".join((errors or lines)[:count])


def choose_rows(variants: str | None, table: Path | None) -> list:
    """The rows to compile: of the shipped table, or of an experiment's own, from which all are taken by default.

    ``table`` is a Python file that defines ROWS, a list of Fwd and Bwd of csrc/variants/table.py; rows of one key
    differ in their tags. Raises ValueError when it does not, or when ``variants`` fits no row.
    """
    if table is None:
        return generate.select(variants or os.environ.get("FLASH3_VARIANTS") or "core")
    rows = runpy.run_path(str(table)).get("ROWS")
    if not rows:
        raise ValueError(f"{table} defines no ROWS")
    return generate.select(variants or "all", rows)


def report(objects: Sequence[Path]) -> str:
    """Registers, stack, spills and compiler messages of every kernel in ``objects``."""
    return ptxas.table([(path.stem, ptxas.read(path.with_suffix(".log"))) for path in objects])


def say(line: str) -> None:
    print(line, flush=True)


def clock(start: float) -> str:
    seconds = int(time.monotonic() - start)
    return f"{seconds // 60}:{seconds % 60:02d}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", help="as FLASH3_VARIANTS, which is the default, then core")
    parser.add_argument("--table", type=Path, help="a file with ROWS of its own, for an experiment")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "kernels", help="folder for objects and logs"
    )
    parser.add_argument(
        "-j",
        "--jobs",
        type=int,
        help="compilers at once (default: MAX_JOBS, or by cores and memory)",
    )
    parser.add_argument("--generate-only", action="store_true", help="write the sources and stop")
    args = parser.parse_args()
    try:
        rows = choose_rows(args.variants, args.table)
        if args.generate_only:
            generate.generate(rows, args.out / "generated")
            return 0
        toolkit = toolchain.find_toolkit()
        if toolkit is None:
            raise BuildError("no CUDA toolkit with nvcc was found; set CUDA_HOME to its folder")
        objects = build(rows, args.out, toolkit, args.jobs or max_jobs(), say)
    except (BuildError, OSError, ValueError, fetch_cutlass.CutlassError) as error:
        print(f"flash3: {error}", file=sys.stderr)
        return 1
    print(report(objects))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
