"""torch's BuildExtension with what an install needs around it: sources, a log, progress, and proof that it loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools.errors import CompileError
from torch.utils import cpp_extension

from build_tools import jobs, plan
from build_tools.build_log import NINJA_STATUS, BuildLog, announce

LOG = plan.ROOT / "build" / "flash3-build.log"

# Loads the built file under the name that it will have; importing torch first puts its libraries in place.
IMPORT_CHECK = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("flash3._C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(len(module.variants()))
"""


def build_ext_for(build: plan.BuildPlan):
    """A build_ext command that carries out ``build``."""
    # The module may have been imported before CUDA_HOME was set, and it looks only once.
    cpp_extension.CUDA_HOME = str(build.toolkit.home)

    class BuildFlash3(cpp_extension.BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            # One folder for every way to install, so that a second one compiles only what has changed.
            self.build_temp = str(plan.ROOT / "build" / "objects" / sys.implementation.cache_tag)

        def build_extensions(self) -> None:
            announce(f"flash3: {build.why}")
            os.environ["MAX_JOBS"] = str(jobs.max_jobs())
            os.environ["NINJA_STATUS"] = NINJA_STATUS
            if not plan.find_ninja():
                announce(
                    "flash3: ninja was not found, so files are compiled one at a time; `pip install ninja` helps"
                )
            with BuildLog(LOG) as log:
                try:
                    log.say("sources and headers")
                    plan.write_sources(build)
                    log.phase = "compile"
                    log.say(f"with {build.toolkit}, {os.environ['MAX_JOBS']} jobs, log in {LOG}")
                    super().build_extensions()
                    log.phase = "check"
                    count = import_check(Path(self.get_ext_fullpath(self.extensions[0].name)))
                    log.say(f"the extension loads and holds {count} kernels")
                    failure = None
                except Exception as error:
                    failure = error
            if failure is not None:
                raise CompileError(
                    f"the build failed; the whole log is in {LOG}\n{log.errors()}"
                ) from failure

    return BuildFlash3


def import_check(path: Path) -> int:
    """Import the built module in a fresh interpreter and return how many kernels it holds."""
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_CHECK, str(path)], capture_output=True, text=True
    )
    if result.returncode:
        sys.stderr.write(result.stderr)  # to the build's log
        raise ImportError(
            f"{path.name} was built but does not import: {result.stderr.strip().splitlines()[-1]}"
        )
    return int(result.stdout.split()[-1])
