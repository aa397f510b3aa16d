"""Malformed files of every format: a named error with a hint, none raw, none that takes long."""

import io
import json
import os
import pickle
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as save_tensors
from tensor_maps import load_tensors

from fastcar_compile.artifact.programs import read_graph_file
from fastcar_compile.artifact.reader import parse_manifest
from fastcar_compile.artifact.thresholds import Thresholds
from fastcar_compile.artifact.trust import _verify
from fastcar_compile.cli.options import read_tokens
from fastcar_compile.codegen.hls.control_table.reader import read_table
from fastcar_compile.codegen.hls.model.question import load_trace
from fastcar_compile.config.targets import load_target
from fastcar_compile.errors import UserError
from fastcar_compile.frontend.checkpoint import ConfigFolder
from fastcar_compile.frontend.pt2 import load_exported
from fastcar_compile.gates import GateWeights
from fastcar_compile.ir.pass_manager import pipeline_from_string
from fastcar_compile.passes.pipeline import PASSES
from fastcar_compile.report.comparison import diff
from fastcar_compile.tune.evaluate import load_cases
from fastcar_compile.tune.evaluate.frames import entry_point
from fastcar_compile.tune.journal import Journal
from fastcar_compile.tune.training.steps import TrainedGate, TrainingState
from fastcar_play.lockstep import load_game

from . import evil


def array(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value, **options)
    return file.getvalue()


def header(text: str) -> bytes:
    """A .npy file of this header and no data."""
    padded = text.encode() + b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded


def archive(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in members.items():
            packed.writestr(f"{name}.npy", data)
    return file.getvalue()


def tensors(header: Any) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


HUGE = "{'descr': '<i8', 'fortran_order': False, 'shape': (4000000000, 1000), }"
MALFORMED: dict[str, bytes] = {
    "nothing": b"",
    "random bytes": np.random.default_rng(0).bytes(1000),
    "a huge number": b"9" * 5000,
    "a list": b"[]",
    "deep lists": b"[" * 10**5,
    "deep objects": b'{"a":' * 10**5,
    "deep TOML": b"a = " + b"[" * 10**5,
    "a key twice": b'{"gate": 1, "gate": 1}',
    "NaN": b'{"gate": NaN}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "an escape": b'{"\x1b[2J": 1}',
    "TOML with a huge number": b"a = " + b"9" * 5000,
    "a pickle": pickle.dumps([1, 2, 3]),
    "an array of objects": array(np.array([None], object), allow_pickle=True),
    "an array without data": header(HUGE),
    "an array of a broken header": header("{'descr': __import__('os'), 'shape': 1}"),
    "an archive of objects": archive(a=array(np.array([None], object), allow_pickle=True)),
    "an archive that unpacks hugely": archive(a=b"\0" * (1 << 24), b=header(HUGE)),
    "a broken archive": archive(a=array(np.zeros(3)))[:-9],
    "texts": array(np.array([["a", "b"]])),
    "tensors of no header": (1 << 60).to_bytes(8, "little"),
    "tensors of a deep header": tensors(b"[" * 10**5),
    "tensors out of bounds": tensors({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}),
    "tensors of a negative place": tensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}),
    "tensors of an unknown type": tensors({"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}) + b"abcd",
    "tensors of a huge shape": tensors({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}}),
    "floats as tensors": save_tensors({"x": torch.zeros(2)}),
}

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "target": ("t.toml", load_target),
    "thresholds": ("t.json", Thresholds.load),
    "manifest": ("manifest.json", lambda path: parse_manifest(path.read_bytes(), str(path))),
    "graph": ("g.json", lambda path: read_graph_file(path, {}, missing_on_meta=True)),
    "graphs to compare": ("g.json", lambda path: diff(path, path)),
    "cases": ("c.json", load_cases),
    "journal": ("j.json", lambda path: Journal(path, "key")),
    "trace": ("t.npy", load_trace),
    "tokens, .npy": ("t.npy", lambda path: read_tokens(path, "prompt file", dims=(1, 2))),
    "tokens, .npz": ("t.npz", lambda path: read_tokens(path, "prompt file", dims=(1, 2))),
    "tokens, .safetensors": ("t.safetensors", lambda path: read_tokens(path, "prompt file", dims=(1, 2))),
    "tensors": ("t.safetensors", load_tensors),
    "gate weights": ("g.safetensors", GateWeights.load),
    "trained gate": ("g.safetensors", TrainedGate.load),
    "checkpoint": (
        "c.safetensors",
        lambda path: TrainingState(path, "key").load(torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)])),
    ),
    "DRS table": ("t.bin", lambda path: read_table(path.read_bytes())),
    "recorded game": ("game.json", load_game),
    "public key": ("k.pem", lambda path: _verify(path.parent, {}, path)),
    "pipeline": ("p.txt", lambda path: pipeline_from_string(path.read_bytes().decode("latin-1"), PASSES)),
    "exported program": ("m.pt2", load_exported),
    "config of a model": ("config.json", lambda path: ConfigFolder(path.parent).skeleton),
}

BYTES = ("manifest", "DRS table", "pipeline", "config of a model")
"""Readers of bytes and texts that others have read, and of a folder that has a file or has it not."""
PLAIN = [name for name in READERS if name not in BYTES]

ACCEPTED = {
    ("cases", "a list"): "no cases",
    ("pipeline", "nothing"): "no passes",
    ("tensors", "floats as tensors"): "two floats",
    ("checkpoint", "floats as tensors"): "of another key: the training begins anew",
}
"""What is no error, and what it means."""


def outcome(format_name: str, what: str, folder: Path) -> str:
    """What the reader makes of the file: "accepted", the named error, or what is wrong about the error."""
    name, read = READERS[format_name]
    path = folder / name
    path.write_bytes(MALFORMED[what])
    started = time.perf_counter()
    try:
        read(path)
    except UserError as error:
        if not error.hint and not all(problem.hint for problem in error.problems or (error,)):
            return f"NO HINT: {error.what}"
        text = f"{type(error).__name__}: {error.what}"
    except Exception as error:
        return f"RAW {type(error).__name__}: {error}"
    else:
        return "accepted"
    seconds = time.perf_counter() - started
    return f"SLOW, {seconds:.0f} s: {text}" if seconds > 5 else text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format_name", READERS)
def test_malformed_files_are_refused_by_name(format_name: str, tmp_path: Path) -> None:
    found = {what: outcome(format_name, what, tmp_path) for what in MALFORMED}
    for what, text in found.items():
        print(f"{format_name:22s} {what:32s} {text[:160]}")
    wrong = {what: text for what, text in found.items() if text.startswith(("RAW", "NO HINT", "SLOW"))}
    assert not wrong, "\n".join(f"{what}: {text[:300]}" for what, text in wrong.items())
    accepted = {(format_name, what) for what, text in found.items() if text == "accepted"}
    assert accepted == {key for key in ACCEPTED if key[0] == format_name}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format_name", READERS)
def test_no_pickle_of_any_format_runs(format_name: str, tmp_path: Path) -> None:
    place = tmp_path / "ran"
    name, read = READERS[format_name]
    objects = array(np.array([evil.Trap(place)], object), allow_pickle=True)
    for data in (pickle.dumps(evil.Trap(place)), evil.pickled(place), objects, archive(tokens=objects)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError):
            read(tmp_path / name)
        assert not place.exists()


def test_a_path_and_a_module_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the prompt file cannot be read: File name too long"):
        read_tokens(tmp_path / ("x" * 300 + ".npy"), "prompt file", dims=(1,))
    for content in (b"\xff\xfe", b"def f(: \0", b"1 / 0"):
        (tmp_path / "own.py").write_bytes(content)
        with pytest.raises(UserError, match=r"own\.py cannot be imported: "):
            entry_point(f"{tmp_path}/own.py:f")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
@pytest.mark.parametrize("format_name", PLAIN)
def test_what_is_no_plain_file_is_refused_before_it_is_read(format_name: str, kind: str, tmp_path: Path) -> None:
    """Nobody writes into the pipe, so that opening it would wait without end; the device has no end."""
    name, read = READERS[format_name]
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    elif kind == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    text = f"it is a {kind}, not a plain file"
    if kind == "folder":  # `diff` takes the folder of an artifact too
        text += "|Is a directory|the folder has no manifest.json"
    with pytest.raises(UserError, match=text):
        read(tmp_path / name)
