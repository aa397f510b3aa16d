"""Models and outputs at places where there is none, of another kind, or with a name that cannot be used."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import PlainDecoder

import fastcar_compile as fc
from fastcar_compile.errors import ArtifactError, CompileError, InputError, UserError

OPTIONS: dict[str, Any] = {"tokens_per_frame": 4, "max_seq_len": 16, "cache": None}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["m.bin", "m.gguf", "m.onnx", "m.safetensors", "m.pt"])
def test_a_file_of_another_kind(name: str) -> None:
    Path(name).write_bytes(b"nothing")
    with pytest.raises(CompileError, match="the model is neither a folder nor"):
        fc.compile(name, output="out", **OPTIONS)
    assert not Path("out").exists()


@pytest.mark.parametrize("name", ["none", "none.pt2", "a\nb"])
def test_a_model_that_is_not_there(name: str) -> None:
    with pytest.raises(CompileError, match="the model does not exist"):
        fc.compile(name, output="out", **OPTIONS)


def test_a_missing_export_is_no_missing_folder() -> None:
    with pytest.raises(CompileError, match=r"no model file\n.*\n.*the file that torch\.export\.save wrote"):
        fc.compile("none.pt2", output="out", **OPTIONS)


def test_a_model_is_no_artifact() -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no manifest\.json.*\n.*\n.*this is a model: `fastcar compile` it first"):
        fc.load("model")


def test_an_artifact_is_no_model() -> None:
    Path("built").mkdir()
    Path("built/manifest.json").write_text("{}")
    with pytest.raises(CompileError, match=r"is an artifact, which is compiled already\n.*\n.*fastcar run"):
        fc.compile("built", output="out", **OPTIONS)


def test_the_path_of_an_export_is_a_model() -> None:
    named = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "cache_position": torch.arange(1)}
    torch.export.save(torch.export.export(PlainDecoder().eval(), (), named, strict=False), "x.pt2")
    options = {**OPTIONS, "max_seq_len": 33}
    for path in ("x.pt2", Path("x.pt2")):
        assert fc.compile(path, dry_run=True, **options).layers
    Path("y.pt2").write_bytes(b"nothing")
    with pytest.raises(UserError, match="the exported program cannot be read"):
        fc.compile("y.pt2", output="out", **OPTIONS)


@pytest.mark.parametrize("options", [{"model": "~/model"}, {"output": "~/out"}, {"output": "~"}])
def test_the_home_of_a_shell_is_refused(options: dict[str, str]) -> None:
    given: dict[str, Any] = {"model": "m", "output": "out", **options, **OPTIONS}
    with pytest.raises(InputError, match=rf"only a shell replaces the ~\n.*give {os.path.expanduser('~')}"):
        fc.compile(**given)


def test_an_output_that_is_not_utf8() -> None:
    with pytest.raises(ArtifactError, match=r"the output's path is not UTF-8\n  where: 'out\\udcff'"):
        fc.compile(PlainDecoder(), output=os.fsdecode(b"out\xff"), **OPTIONS)
    assert os.listdir() == []


def test_a_folder_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir("gone")
    os.rmdir(tmp_path / "gone")
    for call in (lambda: fc.compile("m", output="out", **OPTIONS), lambda: fc.load("built")):
        with pytest.raises(InputError, match="the current folder was deleted"):
            call()


def test_links_in_an_artifact_are_named(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("{}")
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / "manifest.json").symlink_to("../real.json")
    with pytest.raises(ArtifactError, match=r"manifest.json is a symbolic link .*\n.*\n.*cp -rL"):
        fc.load("built")
    (tmp_path / "built" / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match=r"the folder has no manifest.json"):
        fc.load("built")
