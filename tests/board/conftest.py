"""One artifact for zcu102, the host program built for its CPU, and the TVM runtime of that CPU."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import tvm
import tvm_ffi
from conftest import check_module, check_tool, missing
from decoders import llama

import fastcar_compile as fc
from fastcar_compile.runtime.backends.hls_csim import cache_folder

FRAME, LENGTH, CHUNK = 8, 65, 16
PACKAGES = ("apache-tvm", "apache-tvm-ffi")
LIBRARIES = ("libtvm_runtime.so", "libtvm_ffi.so")
FOLDERS = {"TVM": Path(tvm.__file__).parent, "FFI": Path(tvm_ffi.__file__).parent}
"""Where the Makefile of the host program finds headers and this machine's libraries."""


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """A small Llama, batch 2, w8a8; layer 0 replays above the median score or so, layer 1 never."""
    check_tool("aarch64-linux-gnu-g++")
    return fc.compile(
        llama(initializer_range=0.2),  # type: ignore[arg-type]
        target="zcu102",
        tokens_per_frame=FRAME,
        max_seq_len=LENGTH,
        batch_size=2,
        replay=fc.ReplayConfig(threshold=(0.0, None)),
        prefill_chunk=CHUNK,
        output=tmp_path_factory.mktemp("board") / "artifact",
    )


@dataclass(frozen=True)
class Machine:
    """How to build and run programs for one CPU: compiler, its libraries of TVM, and what runs them."""

    compiler: str
    libraries: dict[str, Path]
    emulator: tuple[str, ...]

    def build(
        self, artifact: fc.Artifact, folder: Path, target: str, **options: str
    ) -> subprocess.CompletedProcess[str]:
        """`make target` of the host program into `folder`."""
        values = {"CXX": self.compiler, "CXXFLAGS": "-O1", "BUILD": str(folder)}
        values |= {k: str(v) for k, v in (FOLDERS | self.libraries).items()} | options
        command = ["make", "-C", str(artifact.path / "host" / "src"), target, *(f"{k}={v}" for k, v in values.items())]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        """A finished program with its texts."""
        words = [*self.emulator, *map(str, command)]
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="session")
def aarch64() -> Machine:
    """The board's CPU: cross compiler, the aarch64 packages of TVM, qemu-user."""
    compiler, emulator = check_tool("aarch64-linux-gnu-g++"), check_tool("qemu-aarch64")
    check_tool("make")
    folder = aarch64_runtime()
    return Machine(compiler, {"TVM_LIB": folder, "FFI_LIB": folder}, (emulator, "-L", "/usr/aarch64-linux-gnu"))


@pytest.fixture(scope="session")
def native() -> Machine:
    """This machine."""
    check_tool("make")
    return Machine(check_tool("g++"), {}, ())


def aarch64_runtime() -> Path:
    """Folder with TVM's runtime libraries for aarch64, of the versions installed here; fetched by pip once."""
    check_module("pip")
    wanted = {name: importlib.metadata.version(name) for name in PACKAGES}
    folder = cache_folder().parent / "aarch64" / "-".join(wanted.values())
    if all((folder / name).is_file() for name in LIBRARIES):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [w for p in ("manylinux_2_28", "manylinux2014") for w in ("--platform", f"{p}_aarch64")]
    packages = [f"{name}=={version}" for name, version in wanted.items()]
    options = [*platforms, "--only-binary=:all:", "--no-deps", "--dest", str(folder), *packages]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options], capture_output=True, text=True, check=False
    )
    if done.returncode:
        missing(f"package missing: {' '.join(packages)} for aarch64, {done.stderr.strip().splitlines()[-1]}")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if Path(member).name in LIBRARIES:
                    partial = folder / f".{Path(member).name}.{os.getpid()}"
                    partial.write_bytes(archive.read(member))
                    partial.replace(folder / Path(member).name)
        wheel.unlink()
    return folder
