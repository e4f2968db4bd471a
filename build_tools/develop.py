"""Build flash3 inside its own folder, for working on it: `make build`.

Kernels are compiled into build/kernels, where an unchanged row is not compiled again and where tests/sass reads them;
the extension is then linked from them and put beside the Python files, so nothing is installed. Without a compiler or
a CUDA build of torch this says what is missing and succeeds: the reference path works.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "csrc")]

from build_tools import fetch_cutlass, kernels, plan  # noqa: E402
from build_tools.jobs import max_jobs  # noqa: E402

KERNELS = ROOT / "build" / "kernels"


def main() -> int:
    try:
        build = plan.make_plan()
        if build.missing:
            print(
                f"flash3: no GPU kernels are built, CPU tensors work: {build.missing}", flush=True
            )
            return 0
        folder = build.prebuilt
        if folder is None:
            print(f"flash3: {build.why}", flush=True)
            objects = kernels.build(build.rows, KERNELS, build.toolkit, max_jobs(), kernels.say)
            print(kernels.report(objects), flush=True)
            folder = KERNELS
    except (kernels.BuildError, ValueError, fetch_cutlass.CutlassError) as error:
        print(f"flash3: {error}", file=sys.stderr)
        return 1
    env = os.environ | {"FLASH3_PREBUILT_KERNELS": str(folder)}
    return subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=ROOT, env=env
    ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
