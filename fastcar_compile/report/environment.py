"""Checks of this machine: one check for each tool, package and device that the package builds and runs with.

No heavy package is imported, so that the checks also work on an incomplete installation.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from pydantic import BaseModel, ConfigDict

from fastcar_compile.codegen.tvm.isa import INSTRUCTION_SETS, runnable, standalone_sets
from fastcar_compile.config.targets import available_targets, load_target
from fastcar_compile.errors import BackendError, count_text, size_text
from fastcar_compile.runtime.backends.hls_csim import ap_types_folder
from fastcar_compile.support.machine import cpu_flags, usable_cores
from fastcar_compile.support.values import checked

Severity = Literal["ok", "info", "warning", "error"]

PACKAGE = "fastcar_compile"
EXTRAS: dict[str, Severity] = {
    "": "error",
    "compile": "warning",
    "onnxruntime": "warning",
    "csim": "warning",
    "sign": "info",
    "wasm": "info",
    "gpu": "info",
}
"""Extra -> severity of a missing package of it; "" stands for the packages that every installation needs."""

DEVICE: dict[str, Severity] = {"": "error", "onnxruntime": "info", "sign": "info", "gpu": "info"}
"""The same where nothing is compiled."""

HOST_HEADERS = {"openssl/opensslconf.h": "libssl-dev", "nlohmann/json.hpp": "nlohmann-json3-dev"}
"""Headers that the C++ host programs include, and Debian's packages of them."""

FEW_BYTES, LITTLE_BYTES = 2 * 10**9, 2 * 10**8
"""Free bytes of the temporary folder: below the first a warning, below the second an error. Design choice: a library of
the shipped example takes 10 MB while it is built, and a test run a few GB."""


@checked()
class Check(BaseModel):
    """One tool, package or resource that was checked.

    Args:
        name: name of the tool, package or resource.
        severity: "error": nothing can be built or decoded; "warning": a part of the package does not work; "info":
            a thing that only some users need is missing; "ok".
        message: what was found. hint: how to correct it; empty where no correction is needed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    severity: Severity
    message: str
    hint: str = ""


def doctor() -> tuple[Check, ...]:
    """Return checks of Python, packages, compilers, emulator, headers, vendor tools, CPU and disk space.

    Without torch the machine only decodes: what only a build needs is not looked for.
    """
    what = "is not on PATH, or does not run: no library for this CPU can be linked, and hls-csim cannot run"
    severity: Severity = "info" if importlib.util.find_spec("torch") is None else "error"
    linker = _check("g++", _version("g++"), severity, what, "install it (Debian: apt install g++)")
    machine = (_xrt(), _gpu(), _cpu(), _disk())
    if severity == "info":
        hint = f'to compile here: pip install "{PACKAGE}[compile]"'
        only = _check("installation", None, "info", "runtime only: it decodes artifacts, and compiles none", hint)
        return (only, *_packages(DEVICE), linker, *machine)
    vitis = "v++ is not on PATH: kernels cannot be synthesised here"
    synthesis = _check("vitis", shutil.which("v++"), "info", vitis, "see docs/tutorial/board.md")
    compilers = (linker, *_cross_compilers(), _headers(), *_host_headers())
    return (*_packages(EXTRAS), *compilers, synthesis, *machine)


def _check(name: str, found: str | None, severity: Severity, missing: str, hint: str) -> Check:
    """Return that a thing is there, with what was found; where nothing was found, what is missing and the hint."""
    if found is not None:
        return Check(name=name, severity="ok", message=found)
    return Check(name=name, severity=severity, message=missing, hint=hint)


def _packages(extras: Mapping[str, Severity]) -> Iterator[Check]:
    """Yield Python's version, and the version of every package of these extras; see EXTRAS."""
    try:
        wanted = importlib.metadata.metadata(PACKAGE)["Requires-Python"]
        requirements = [Requirement(text) for text in importlib.metadata.requires(PACKAGE) or []]
    except PackageNotFoundError:
        yield _check(PACKAGE, None, "error", "is not installed", "pip install -e . in its folder")
        return
    python = Requirement(f"python{wanted}")
    yield _version_check(python, platform.python_version(), "error", f"install Python {wanted}")
    for extra, severity in extras.items():
        for requirement in (each for each in requirements if each.name != PACKAGE):
            marker = requirement.marker
            # Of an extra is what the base installation does not take too.
            base = marker is None or marker.evaluate({"extra": ""})
            if base if not extra else not base and marker is not None and marker.evaluate({"extra": extra}):
                yield _package(requirement, extra, severity)


def _package(requirement: Requirement, extra: str, severity: Severity) -> Check:
    """Return whether a package is there, in a version that was tested."""
    name, wanted = requirement.name, requirement.specifier
    try:
        version = importlib.metadata.version(name)
    except PackageNotFoundError:
        install = f'pip install "{PACKAGE}[{extra}]"' if extra else f"pip install {PACKAGE}"
        return _check(name, None, severity, f"is not installed (wants {wanted})", install)
    return _version_check(requirement, version, severity, f'pip install "{name}{wanted}"')


def _version_check(wanted: Requirement, version: str, severity: Severity, hint: str) -> Check:
    text, fits = f"{version} (wants {wanted.specifier})", wanted.specifier.contains(version, prereleases=True)
    return _check(wanted.name, text if fits else None, severity, text, hint)


def _cross_compilers() -> Iterator[Check]:
    """Yield the linkers of the boards' CPUs, and the emulators that run the linked programs."""
    yield _check(
        "node", _version("node"), "info", "is not on PATH: wasm32 decoders run in browsers only", "install nodejs"
    )
    boards: dict[str, list[str]] = defaultdict(list)
    for name in available_targets():
        triple = load_target(name).host_triple
        if triple.partition("-")[0] != platform.machine() and not standalone_sets(triple):
            boards[triple].append(name)
    for triple, names in sorted(boards.items()):
        compiler, emulator = f"{triple}-g++", f"qemu-{triple.partition('-')[0]}"
        missing = f"is not on PATH: host programs of {', '.join(names)} are written as object files"
        yield _check(compiler, _version(compiler), "warning", missing, f"install it (Debian: apt install g++-{triple})")
        missing = f"is not on PATH: programs for {triple} cannot be run here"
        yield _check(emulator, _version(emulator), "info", missing, "install qemu-user")


def _version(name: str) -> str | None:
    """Return the first line of a program's version text; None: the program is not on PATH, or does not run."""
    path = shutil.which(name)
    done = None if path is None else _ran([path, "--version"])
    return None if done is None or done.returncode else next(iter(done.stdout.splitlines()), path)


def _ran(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str] | None:
    """Return what a program gave for an input; None: the program does not run."""
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None


def _headers() -> Check:
    """Return whether C simulation finds its headers."""
    try:
        return _check("ap_types headers", str(ap_types_folder()), "ok", "", "")
    except BackendError as error:
        return _check("ap_types headers", None, "warning", error.what, error.hint)


def _host_headers() -> Iterator[Check]:
    """Yield whether the boards' compilers find the headers of the host programs."""
    compilers = {f"{load_target(name).host_triple}-g++" for name in available_targets()}
    compilers = {name.removeprefix(f"{platform.machine()}-linux-gnu-") for name in compilers}
    missing = "is missing: host programs cannot be built"
    for compiler in sorted(filter(shutil.which, compilers)):
        for header, package in HOST_HEADERS.items():
            text = f"#if !__has_include(<{header}>)\n#error missing\n#endif\n"
            done = _ran([compiler, "-E", "-x", "c++", "-"], text)
            if done is not None:  # else the compiler's own check says so
                hint = f"install it for that CPU (Debian: {package}), or see docs/tutorial/board.md"
                found = None if done.returncode else "is there"
                yield _check(f"{header} ({compiler})", found, "info", missing, hint)


def _xrt() -> Check:
    """Return whether backend `board` finds XRT."""
    found = None if importlib.util.find_spec("pyxrt") is None else "pyxrt is installed"
    folder = os.environ.get("XILINX_XRT")
    what = "pyxrt is not installed" if folder is None else f"pyxrt is not on Python's path, and XILINX_XRT is {folder}"
    hint = "install XRT on the board and source its setup.sh"
    return _check("xrt", found, "info", f"{what}: backend board cannot run here", hint)


_ADAPTER = """import wgpu
print("{adapter_type} {device}".format(**wgpu.gpu.request_adapter_sync(power_preference="high-performance").info))"""


def _gpu() -> Check:
    """Return which adapter backend `webgpu` finds, by a process of its own: drivers write to the console, or crash."""
    done = _ran([sys.executable, "-c", _ADAPTER])
    said = "" if done is None or done.returncode else done.stdout.strip()
    kind, _, device = said.partition(" ")
    found = f"{device}, a software adapter" if kind == "CPU" else device or None
    what = "no adapter is found: backend webgpu cannot run here"
    return _check("gpu", found, "info", what, "install a GPU's Vulkan driver and the extra gpu, or use the backend cpu")


def _cpu() -> Check:
    """Return the instruction sets that libraries can use here, the best first."""
    machine = platform.machine()
    names = ", ".join(isa.name for isa in runnable(INSTRUCTION_SETS, machine, cpu_flags()))
    found = f"{machine}, {count_text(usable_cores(), 'core')}: {names}" if names else None
    what = f"{machine} has none of the instruction sets that libraries are built for"
    return _check("cpu", found, "error", what, "use a CPU with SSE4.2 or NEON")


def _disk() -> Check:
    """Return whether the temporary folder has room for the files of other packages."""
    folder = Path(os.environ.get("TMPDIR", "/tmp"))
    try:
        folder = Path(tempfile.gettempdir())  # raises where none of the usual folders can be written
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        hint = "set TMPDIR to a folder that can be written"
        return _check("TMPDIR", None, "error", f"{folder}: {error.strerror}", hint)
    text = f"{folder}: {size_text(free)} free"
    severity: Severity = "warning" if free >= LITTLE_BYTES else "error"
    found = text if free >= FEW_BYTES else None
    return _check("TMPDIR", found, severity, text, "set TMPDIR to a folder with more room, or free some")
