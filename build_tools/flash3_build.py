"""In-tree PEP 517 backend: setuptools, able to see the torch that is already installed.

pip builds in an environment that hides installed packages. flash3 must be built against the torch it will run with, and
installing a second torch to build with would be slow, need the network and possibly not match. pip runs the backend
with the environment's own interpreter, so its site-packages can be put back on the path; nothing is required from an
index unless setuptools itself is absent.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

for _path in (sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")):
    if _path not in sys.path:
        sys.path.append(_path)

# pip hides packages from child processes (ninja, the import check) through PYTHONPATH.
if "PYTHONPATH" in os.environ:
    _kept = [p for p in os.environ["PYTHONPATH"].split(os.pathsep) if "pip-build-env" not in p]
    os.environ["PYTHONPATH"] = os.pathsep.join(_kept)


def _requirements() -> list[str]:
    """What must come from an index: nothing where the environment has setuptools."""
    if importlib.util.find_spec("setuptools") is None:
        return ["setuptools>=70.1"]
    from setuptools import __version__

    needs_wheel = tuple(int(part) for part in __version__.split(".")[:2]) < (70, 1)
    return ["wheel"] if needs_wheel and importlib.util.find_spec("wheel") is None else []


def get_requires_for_build_wheel(config_settings=None):
    return _requirements()


def get_requires_for_build_editable(config_settings=None):
    return _requirements()


def get_requires_for_build_sdist(config_settings=None):
    return _requirements()


def _setuptools():
    from setuptools import build_meta

    return build_meta


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    return _setuptools().prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    return _setuptools().prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    for stale in (ROOT / "build").glob(
        "lib*"
    ):  # else a module deleted since the last build would be packaged
        shutil.rmtree(stale, ignore_errors=True)
    return _setuptools().build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return _setuptools().build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    return _setuptools().build_sdist(sdist_directory, config_settings)
