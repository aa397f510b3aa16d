"""What the fuzzers need besides this package, and the fuzzers of C++ code as programs."""

import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import IO

from fastcar_compile.codegen.hls.project import generated_headers
from fastcar_compile.runtime.backends.hls_csim import ap_types_folder
from fuzz.seeds import PYTHON

SOURCES = Path(__file__).with_name("cpp")
CPP = tuple(sorted(path.stem for path in SOURCES.glob("*.cpp")))
"""Fuzzers of C++ code."""

# float-cast-overflow is no part of `undefined`.
SANITIZE = ("-fsanitize=fuzzer,address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")
FLAGS = ("-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
LIBRARIES = {"host_files": ("-lcrypto",)}


def missing(names: Sequence[str]) -> list[str]:
    """What has to be installed before these fuzzers run."""
    found = list[str]()
    if set(names) & set(PYTHON) and importlib.util.find_spec("atheris") is None:
        found.append("the Python package atheris: pip install 'fastcar_compile[fuzz]'")
    if set(names) & set(CPP):
        clang = shutil.which("clang++")
        if clang is None:
            return [*found, "clang++ (Debian: clang)"]
        asked = subprocess.run([clang, "-print-file-name=lib"], capture_output=True, text=True, check=True)
        folder = Path(asked.stdout.strip()) / "linux"
        if not list(folder.glob("libclang_rt.fuzzer-*.a")):
            found.append(f"clang's runtime for fuzzing, in {folder} (Debian: libclang-rt-14-dev)")
    return found


def build(name: str, folder: Path, log: IO[bytes]) -> Path | None:
    """The program of a fuzzer of C++ code; None where it cannot be built, and the log says why."""
    program = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    for header, text in generated_headers().items():
        (folder / header).write_text(text)
    templates = files("hls_templates")
    include = [f"-I{folder}", f"-I{templates}", f"-I{templates / 'host'}", "-isystem", str(ap_types_folder())]
    source = [str(SOURCES / f"{name}.cpp"), "-o", str(program)]
    command = ["clang++", *FLAGS, *SANITIZE, *include, *source, *LIBRARIES.get(name, ())]
    done = subprocess.run(command, stdout=log, stderr=log, check=False)
    return program if done.returncode == 0 else None
