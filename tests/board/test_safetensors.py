"""The C++ reader of safetensors files, under address and UB sanitizers: what Python writes, and what is refused."""

import json
import struct
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from conftest import check_tool

from fastcar_compile.ir.tensor_files import save_tensors

NAMES = ("a", 'b "x"')
REAL = np.array([1.5], np.float32)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of read_tensors.cpp."""
    program = tmp_path_factory.mktemp("reader") / "read_tensors"
    options = ["-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    source = Path(__file__).parent / "read_tensors.cpp"
    command = [check_tool("g++"), *options, f"-I{files('hls_templates') / 'host'}", str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return program


def read(reader: Path, *paths: Path) -> list[str]:
    """A line per file."""
    done = subprocess.run([reader, *paths], capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def good(folder: Path) -> bytes:
    """A file as the artifact's are."""
    save_tensors(folder / "good", {NAMES[0]: np.arange(6, dtype=np.int8).reshape(2, 3), NAMES[1]: REAL})
    return (folder / "good").read_bytes()


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header, ensure_ascii=False).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: str = "I8", shape: tuple[int, ...] = (2,), offsets: tuple[int, ...] = (0, 2)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_what_python_writes_is_read(reader: Path, tmp_path: Path) -> None:
    good(tmp_path)
    other = {"a": tensor(shape=(), offsets=(0, 1)), NAMES[1]: tensor("F32", (0, 4), (1, 1)), "__metadata__": {"k": "v"}}
    (tmp_path / "other").write_bytes(with_header(other, b"\7"))
    byte_sum = sum(REAL.tobytes())
    lines = read(reader, tmp_path / "good", tmp_path / "other")
    assert lines == [f"ok I8[2] 15 F32[1] {byte_sum}", "ok I8[0] 7 F32[2] 0"]


BAD = "refused the file is no valid safetensors file: "
NO_NUMBER = "refused the file is damaged: a version or a size is no whole number"
REFUSED = {
    "short": (b"\1\2\3", BAD + "it has no header"),
    "long header": (struct.pack("<Q", 2**63) + b"{}", BAD + "its header is longer than the file"),
    "header by one": (struct.pack("<Q", 3) + b"{}", BAD + "its header is longer than the file"),
    "no object": (with_header(b"[]"), BAD + "[json.exception.type_error.303]"),
    "text after": (with_header(b"{} x"), "refused the file is damaged: no JSON at byte 4"),
    "negative": (with_header({"a": tensor(offsets=(-1, 2))}), NO_NUMBER),
    "huge": (with_header({"a": tensor(offsets=(0, 10**30))}), NO_NUMBER),
    "backwards": (with_header({"a": tensor(offsets=(2, 0))}, b"12"), BAD + "`a` does not fit its place"),
    "no offsets": (with_header({"a": {"dtype": "I8", "shape": []}}), BAD + "[json.exception.out_of_range.403]"),
    "type": (with_header({"a": tensor("F8")}, b"12"), BAD + "`a` has the unknown type F8"),
    "control": (with_header({"\b\r\x9b": tensor("F8")}, b"12"), BAD + "`???` has the unknown type F8"),
    "beyond": (with_header({"a": tensor(shape=(3,), offsets=(0, 3))}, b"12"), BAD + "`a` does not fit its place"),
    "size": (with_header({"a": tensor(shape=(1,))}, b"12"), BAD + "`a` does not fit its place"),
    "overflow": (with_header({"a": tensor(shape=(2**33, 2**33))}, b"12"), BAD + "`a` is larger than the file"),
    "wrapped": (with_header({"a": tensor(shape=(2**63, 2), offsets=(0, 0))}), BAD + "`a` is larger than the file"),
    "lacking": (with_header({"a": tensor()}, b"12"), 'refused there is no tensor `b "x"`'),
}


def test_refused(reader: Path, tmp_path: Path) -> None:
    for name, (data, _) in REFUSED.items():
        (tmp_path / name).write_bytes(data)
    lines = read(reader, *map(tmp_path.joinpath, REFUSED))
    said = dict(zip(REFUSED, lines, strict=True))
    assert {name: said[name] for name, (_, text) in REFUSED.items() if not said[name].startswith(text)} == {}
