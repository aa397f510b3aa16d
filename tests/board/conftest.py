"""One artifact for zcu102, the host program built for its CPU, and the TVM runtime of that CPU."""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tvm
import tvm_ffi
from conftest import board_libraries, built_once, check_module, check_tool, missing, shared_folder
from decoders import llama
from exact.conftest import compiled as exact_step
from filelock import FileLock
from gates import foreign
from gates.networks import networks
from trust.conftest import keys as keys

import fastcar_compile as fc
from fastcar_compile.artifact.digest import cache_folder
from fastcar_compile.codegen.hls.design.design import Design
from fastcar_compile.codegen.hls.interface import probe_interface
from fastcar_compile.codegen.tvm.isa import instruction_set
from fastcar_compile.runtime.backends.hls_csim import ap_types_folder
from fastcar_compile.support.machine import cpu_flags

FRAME, LENGTH, CHUNK = 8, 65, 4
HOST_CPU = "avx2" if instruction_set("avx2").flags <= cpu_flags() else "native"
"""So that whole decoders run with AVX2 in every run; tests elsewhere have the best instruction set."""

XRT_HEADERS = Path("/usr/include/xrt")
PACKAGES = ("apache-tvm", "apache-tvm-ffi")
LIBRARIES = ("libtvm_runtime.so", "libtvm_ffi.so")
FOLDERS = {"TVM": Path(tvm.__file__).parent, "FFI": Path(tvm_ffi.__file__).parent}
"""Where the Makefile of the host program finds headers and this machine's libraries."""


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """A small Llama, batch 2, w8a8, MLPs on the accelerator, int8 caches; layer 0 replays in part, layer 1 never."""
    return built_once(tmp_path_factory, "board", compiled_board)


@pytest.fixture(scope="session")
def engine_artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """One layer of it in w4a8, with the projections and the head on the accelerator too, and sparse attention over
    bfloat16 caches."""
    sparse = fc.SparseAttention(window=5, sinks=3, positions="cache")
    changes: dict[str, Any] = {"quant": "w4a8", "offload": "linears", "sparse_attention": sparse, "kv": "bfloat16"}
    return built_once(tmp_path_factory, "engine", lambda output: compiled(output, (0.0,), layers=1, **changes))


@pytest.fixture(scope="session")
def half_artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """One layer, batch 2, w8a8: the accelerator decides by keys in float16."""
    changes: dict[str, Any] = {"layers": 1, "kv": "float16", "prefill_chunk": 1}
    return built_once(tmp_path_factory, "half", lambda output: compiled(output, (0.0,), **changes))


@pytest.fixture(scope="session")
def rtl_artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """Whole steps, with the engine as a kernel of its own."""
    changes: dict[str, Any] = {"offload": "all", "engine": "rtl", "replay": fc.ReplayConfig(threshold=0.0)}
    return built_once(tmp_path_factory, "rtl", lambda output: exact_step(output, **changes))


@pytest.fixture(scope="session")
def rows_artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """Whole steps of two videos, four positions each."""
    changes: dict[str, Any] = {"offload": "all", "rows": 4, "replay": fc.ReplayConfig(threshold=0.0, max_chain=3)}

    def build(output: Path) -> fc.Artifact:
        exact_step(output.with_name("rows_build"), **changes).path.rename(output)
        return fc.load(output)

    return built_once(tmp_path_factory, "rows", build)


@pytest.fixture(scope="module")  # the gate is registered for no other file
def foreign_artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[fc.Artifact]:
    """One layer, batch 4, w8a8, for a card with wide ports: the host decides, by a gate of another package."""
    with pytest.MonkeyPatch.context() as patch:
        changes: dict[str, Any] = {"gate": foreign.register(patch), "target": "u280", "batch_size": 4}
        changes |= {"threshold": (1.1,), "layers": 1, "prefill_chunk": 1}
        yield built_once(tmp_path_factory, "foreign", lambda output: compiled(output, **changes))


@pytest.fixture(scope="session")
def learned_artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """One layer, batch 2, w8a8: the accelerator decides by a network on the change of its input."""
    changes: dict[str, Any] = {"gate": "learned", "gate_weights": networks(64, 5), "prefill_chunk": 1}
    return built_once(tmp_path_factory, "learned", lambda output: compiled(output, (0.0,), layers=1, **changes))


def compiled(output: Path, threshold: tuple[float | None, ...], *, layers: int = 2, **given: Any) -> fc.Artifact:
    """Compile a small Llama. given: options of `compile`, and gate and gate_weights."""
    gate = {"gate": given.pop("gate", "tas"), "gate_weights": given.pop("gate_weights", None)}
    options: dict[str, Any] = {"target": "zcu102", "batch_size": 2, "quant": "w8a8", "prefill_chunk": CHUNK}
    options |= {"offload": "mlp", "kv": "float32", "host_cpus": [HOST_CPU], **given}
    return fc.compile(
        llama(initializer_range=0.2, num_hidden_layers=layers), tokens_per_frame=FRAME, max_seq_len=LENGTH,
        replay=fc.ReplayConfig(**gate, threshold=threshold), output=output, **options,
    )  # fmt: skip


def compiled_board(output: Path) -> fc.Artifact:
    """The artifact of `artifact`, with the library for the board's CPU linked."""
    check_tool("aarch64-linux-gnu-g++")
    with board_libraries():
        return compiled(output, (0.0, None), kv="int8")


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[fc.Artifact], Path]:
    """`fake_library(artifact)`: fake_xrt.cpp as libxrt_coreutil.so.2, with the artifact's kernels in C simulation."""
    check_module("hls4ml")
    if not (XRT_HEADERS / "xrt" / "xrt_kernel.h").is_file():
        missing("package missing: libxrt-dev")
    root = shared_folder(tmp_path_factory)

    @cache
    def build(sources: Path, kernels: str) -> Path:
        folder = root / f"fake_xrt_{hashlib.sha256(f'{sources} {kernels}'.encode()).hexdigest()[:16]}"
        library = folder / "libxrt_coreutil.so.2"
        with FileLock(f"{folder}.lock"):
            if not library.is_file():  # no other test process has built it
                folder.mkdir()
                (folder / "fake_names.hpp").write_text(argument_names(json.loads(kernels)))
                build_fake(sources, library)
        return library

    def library(artifact: fc.Artifact) -> Path:
        accelerator = artifact.manifest.accelerator
        assert accelerator is not None
        probe = probe_interface(Design.of(accelerator.design)).part
        return build(artifact.path / "hls", json.dumps([k.model_dump() for k in (*accelerator.kernels, probe)]))

    return library


def build_fake(sources: Path, library: Path) -> None:
    """Compile fake_xrt.cpp with the kernels of a folder, by the compiler that is done first; fake_names.hpp lies beside
    the library."""
    options = ["-std=c++17", "-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-w"]
    include = [f"-I{library.parent}", f"-I{sources}", "-isystem", str(ap_types_folder()), "-isystem", str(XRT_HEADERS)]
    source = Path(__file__).parent / "fake_xrt.cpp"
    command = [check_tool("clang++"), *options, *include, str(source), "-o", str(library), "-luuid"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


@pytest.fixture(scope="session")
def meminfo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`meminfo(bytes)`: a file such as /proc/meminfo with so much contiguous memory free, of twice as much."""
    folder = tmp_path_factory.mktemp("meminfo")

    def write(free: int) -> Path:
        path = folder / str(free)
        sizes = f"CmaTotal: {free // 512} kB\nCmaFree:  {free // 1024} kB\n"
        path.write_text(f"MemTotal: 4034284 kB\n{sizes}HugePages_Total: 0\n")
        return path

    return write


def argument_names(kernels: list[dict[str, Any]]) -> str:
    """The header fake_names.hpp."""
    of_kernels = [(k["name"], [*(a["name"] for a in k["arguments"]), *k["streams"]]) for k in kernels]
    names = (f'{{"{name}", {{{", ".join(map(json.dumps, own))}}}}}' for name, own in of_kernels)
    table = f"const std::map<std::string, std::vector<std::string>> ARGUMENT_NAMES = {{{', '.join(names)}}};"
    return f"#include <map>\n#include <string>\n#include <vector>\n{table}\n"


@dataclass(frozen=True)
class Machine:
    """How to build and run programs for one CPU: compiler, its libraries of TVM, and what runs them."""

    compiler: str
    libraries: dict[str, Path]
    emulator: tuple[str, ...]

    def build(self, artifact: Path, folder: Path, target: str, **options: str) -> subprocess.CompletedProcess[str]:
        """`make target` of the host program into `folder`."""
        values = {"CXX": self.compiler, "CXXFLAGS": "-O0", "BUILD": str(folder)}
        values |= {k: str(v) for k, v in (FOLDERS | self.libraries).items()} | options
        command = ["make", "-C", str(artifact / "host" / "src"), target, *(f"{k}={v}" for k, v in values.items())]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        """A finished program with its texts. One thread: TVM's threads wait in loops, which stand still under qemu."""
        words, environment = [*self.emulator, *map(str, command)], os.environ | {"TVM_NUM_THREADS": "1"}
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120, env=environment)


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
    folder = cache_folder() / "aarch64" / "-".join(wanted.values())
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
