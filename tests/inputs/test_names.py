"""Names of a model in what is generated: refused where they cannot be written, harmless where they can."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import PlainBlock, PlainDecoder
from torch import Tensor
from torch.nn import functional as F

import fastcar_compile as fc
from fastcar_compile.errors import CompileError

STRANGE = "Layer:0//@x [1] \u00e9\u5c42 -+ Upper/y" + "z" * 600
REFUSED = {
    "the end of a comment": "a*/ #error",
    "a quote": 'a"; f(); "',
    "a backslash": "a\\",
    "a trigraph": "a??/",
    "a sign of direction": "a\u202eb",
    "half a pair": "\ud800",
    "an escape": "\x1b[2J",
    "NUL": "a\0b",
    "a long name": "a" * 1000,
}


class Named(PlainBlock):
    """A block whose linears have names of a caller."""

    name = STRANGE

    def __init__(self, width: int, rows: int, batch: int) -> None:
        super().__init__(width, rows, batch)
        for old in ("up", "down"):
            self.add_module(self.name + old, self._modules.pop(old))

    def mlp(self, x: Tensor) -> Tensor:
        up, down = (self.get_submodule(self.name + old) for old in ("up", "down"))
        return down(F.gelu(up(x)))


def named(name: str) -> PlainDecoder:
    block = type("Block", (Named,), {"name": name})
    return type("Decoder", (PlainDecoder,), {"block": block})(layers=1).eval()


@pytest.mark.parametrize("what", REFUSED)
def test_a_name_that_cannot_be_written_is_refused(what: str) -> None:
    options: dict[str, Any] = {"target": "cpu", "tokens_per_frame": 4}
    with pytest.raises(CompileError) as caught:
        fc.compile(named(REFUSED[what]), dry_run=True, **options)
    assert caught.value.what == "6 names of the model cannot be written"
    assert caught.value.where.startswith("'blocks.0.")
    assert caught.value.where.isascii()
    assert caught.value.where.isprintable()
    assert "rename it" in caught.value.hint


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names") / "a"
    options: dict[str, Any] = {"target": "zcu102", "offload": "mlp", "tokens_per_frame": 4, "prefill_chunk": 1}
    fc.compile(named(STRANGE), **options, output=str(folder), replay=fc.ReplayConfig())
    return folder


def test_the_host_program_holds_the_name_and_compiles(strange: Path, tmp_path: Path) -> None:
    sources = strange / "host" / "src"
    main = tmp_path / "main.cpp"
    main.write_text(
        '#include "fastcar_kernels.hpp"\n#include "fastcar_program.hpp"\n#include <iostream>\n'
        'int main() { for (auto& n : fastcar_host::decoder_spec().decode.params) std::cout << n << "\\n"; }\n'
    )
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{sources}"]
    subprocess.run(["g++", *flags, str(main), "-o", str(tmp_path / "main")], check=True)
    said = subprocess.run([tmp_path / "main"], check=True, capture_output=True).stdout.decode("utf-8")
    assert f"blocks.0.{STRANGE}up.bias" in said.splitlines()


def test_no_name_of_the_model_is_in_the_accelerator(strange: Path) -> None:
    files = [path for path in (strange / "hls").rglob("*") if path.is_file() and path.suffix != ".bin"]
    texts = {path.name: path.read_text() for path in files}
    assert texts
    assert [name for name, text in texts.items() if "zzz" in text or not text.isascii()] == []


def test_the_graph_can_be_read_again(strange: Path) -> None:
    with fc.load(strange) as artifact:
        session = artifact.session(backend="eager")
        assert session.generate(torch.ones(1, 1, dtype=torch.int64), 2).shape == (1, 2)
