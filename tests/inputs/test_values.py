"""Every public name, given what nobody means: it works, or a named error says what is wrong."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gates.drafts import random_draft
from manifests import stored_thresholds
from pydantic import BaseModel
from runtime.test_prompts import NotedStepper
from torch import nn

import fastcar_compile as fc
from fastcar_compile.config.options import CompileOptions
from fastcar_compile.errors import UserError
from fastcar_compile.ir.types import DecoderConfig
from fastcar_compile.runtime.backends.base import Stepper
from fastcar_compile.runtime.session import Session

from .test_manifest import whole

HOSTILE: dict[str, Any] = {
    "None": None,
    "true": True,
    "zero": 0,
    "negative": -1,
    "huge": 10**30,
    "of too many digits": 10**5000,
    "a fraction": 2.5,
    "NaN": math.nan,
    "infinite": math.inf,
    "a text": "abc",
    "no text": "",
    "a number as a text": "2",
    "bytes": b"abc",
    "NUL": "a\0b",
    "an escape": "\x1b[2J",
    "a list": [1, 2],
    "nested": [[1], [1, 2]],
    "no list": [],
    "a dict": {"a": 1},
    "a set": {1},
    "an object": object(),
    "a function": lambda *_: None,
    "a type": int,
    "a numpy integer": np.int64(2),
    "a numpy float": np.float32(0.5),
    "a numpy truth": np.bool_(True),
    "a numpy text": np.str_("abc"),
    "no dimensions": np.array(2),
    "an array": np.zeros((2, 3), np.int64),
    "an empty array": np.zeros((0,), np.int64),
    "objects": np.array([None, "a"], object),
    "a tensor": torch.zeros(2, 3, dtype=torch.int64),
    "a scalar tensor": torch.tensor(2),
    "bfloat16": torch.zeros(2, 3, dtype=torch.bfloat16),
    "sparse": torch.zeros(2, 3).to_sparse(),
    "meta": torch.zeros(2, 3, device="meta"),
    "a meta scalar": torch.tensor(2.0, device="meta"),
    "complex": 1j,
    "a path": Path("/nowhere/at/all"),
}


CONFIG: DecoderConfig = whole().decoder.config
FC: Any = fc
"""As a caller without a type checker sees it."""

PROMPT = np.ones((2, 3), np.int64)


def session() -> Session:
    return Session(NotedStepper(), CONFIG, [0.5, 0.5, None], gate="tas")


def after_prompt() -> Session:
    opened = session()
    opened.prefill(PROMPT)
    return opened


class Stored:
    """What `Artifact.session` reads of itself."""

    manifest = whole()
    path = Path("/nowhere")
    thresholds = None
    digest = f"sha256:{'0' * 64}"


def open_fake(artifact: Any, options: Any) -> Stepper:
    return NotedStepper()


STORED: Any = Stored()
THRESHOLDS = dict(stored_thresholds(0.5))
TRAINED: dict[str, Any] = {
    "gate": "tas", "layers": ({"heads": torch.ones(2)},), "thresholds": (0.5,), "target": 0.5, "replay": 0.5,
    "nll": 1.0, "nll_dense": 1.0, "price": 0.1, "inputs": "y",
}  # fmt: skip
MODEL = nn.Linear(2, 2)
OPTIONS: dict[str, Any] = {"target": "cpu", "tokens_per_frame": 4, "max_seq_len": 32}
CONSTRUCTED: dict[str, dict[str, Any]] = {
    "CompileConfig": OPTIONS,
    "Draft": {"digest": "00" * 32},
    "Jacobi": {},
    "ReplayConfig": {},
    "Sampling": {},
    "SparseAttention": {"window": 2},
    "Target": {name: getattr(fc.load_target("cpu"), name) for name in fc.Target.model_fields},
    "Thresholds": THRESHOLDS,
    "TrainedGate": TRAINED,
}
"""Public model or dataclass -> fields that it accepts."""
VIDEOS = np.ones((2, 9), np.int64)

Call = Callable[[Any], object]


def by_name(function: Callable[..., object], without: tuple[str, ...] = (), **needed: Any) -> dict[str, Call]:
    """Parameter -> the call with a hostile value for it, beside what it needs."""
    names = [name for name in inspect.signature(function).parameters if name not in without]
    return {name: (lambda v, name=name: function(**{**needed, name: v})) for name in names}


CALLS: dict[str, dict[str, Call]] = {
    "Artifact": {"path": lambda v: fc.Artifact(v)},
    "Session": {
        "step": lambda v: after_prompt().step(v),
        "prefill": lambda v: session().prefill(v),
        "set_threshold": lambda v: session().set_threshold(v),
        "set_context": lambda v: session().set_context(v),
        "extend": lambda v: after_prompt().extend(v),
        "jacobi": lambda v: session().generate(PROMPT, 2, jacobi=v),
        "prompt": lambda v: session().generate(v, 2),
        "num_tokens": lambda v: session().generate(PROMPT, v),
        "sample": lambda v: session().generate(PROMPT, 2, sample=v),
        "sampled": lambda v: session().generate(PROMPT, 2, sample=lambda _logits: v),
        "on_token": lambda v: session().generate(PROMPT, 2, on_token=v),
        "backend": lambda v: fc.Artifact.session(STORED, v),
        "rewind": lambda v: after_prompt().rewind(v),
        "save": lambda v: session().save(v),
        "load": lambda v: session().load(v),
        "keep": lambda v: fc.Artifact.session(STORED, open_fake, keep=v),
        "threads": lambda v: fc.Artifact.session(STORED, open_fake, threads=v),
        "depth": lambda v: fc.Artifact.session(STORED, open_fake, depth=v),
    },
    "Cache": by_name(fc.Cache, remote="https://nowhere"),
    "Thresholds": {
        "load a file": lambda v: fc.Thresholds.load(v),
        "save to a file": lambda v: fc.Thresholds(**THRESHOLDS).save(v),
    },
    "Draft": {
        "load a file": lambda v: fc.Draft.load(v),
        "save to a file": lambda v: random_draft(4).save(v),
        "a draft of a configuration": lambda v: fc.ReplayConfig(draft=v),
    },
    "load": by_name(fc.load, path="/nowhere/at/all"),
    "inspect": {"artifact": lambda v: fc.inspect(v, "/nowhere/at/all")},
    "diff": by_name(fc.diff, a="/nowhere", b="/nowhere"),
    "load_target": by_name(fc.load_target),
    "compile": {
        **by_name(fc.compile, without=("output", "dry_run", "options"), model="/nowhere", target="cpu", dry_run=True),
        **{n: (lambda v, n=n: FC.compile("/nowhere", dry_run=True, **{n: v})) for n in CompileOptions.__annotations__},
    },
    "calibrate": by_name(fc.calibrate, source=MODEL, videos=VIDEOS, target_replay=0.5),
    "train_gate": by_name(fc.train_gate, model=MODEL, videos=VIDEOS, target_replay=0.5),
    "adapt": by_name(fc.adapt, without=("others",), model=MODEL, tokens="input", position="input"),
    "fit_draft": by_name(fc.fit_draft, source=MODEL, videos=VIDEOS, tokens_per_frame=1),
    "tune_decoder": by_name(fc.tune_decoder, model=MODEL, videos=VIDEOS, target_replay=0.5),
    "sign": by_name(fc.sign, without=("passphrase",), path="/nowhere", private_key="/nowhere"),
    "verify_signature": {
        **by_name(fc.verify_signature, without=("digest",), path="/nowhere", public_key="/nowhere"),
        "digest": lambda v: fc.verify_signature("/nowhere", digest=v),
    },
    "TrainedGate": {
        "load a file": lambda v: fc.TrainedGate.load(v),
        "save to a file": lambda v: fc.TrainedGate(**TRAINED).save(v),
        "save a tensor": lambda v: FC.TrainedGate(**TRAINED | {"layers": ({"heads": v},)}).save("gate.safetensors"),
    },
    "Batcher": {"artifact": lambda v: fc.Batcher(v)},
    "VideoPipeline": by_name(
        fc.VideoPipeline, ("depth", "blank", "backend", "threads"), artifact=STORED, encode=list, decode=list
    ),
    "TransformersDecoder": {"session": lambda v: fc.TransformersDecoder(v)},
}
"""Public name -> argument -> the call with a hostile value for it."""

FUNCTIONS = ("sample", "on_token", "progress", "backend")
OTHERS: dict[str, str] = {
    "available_targets": "takes nothing", "doctor": "takes nothing",
}  # fmt: skip
"""Public names that take no value of a user."""


def constructed() -> dict[str, list[str]]:
    """Every public model and dataclass, and its fields: found, not listed."""
    classes = {name: getattr(fc, name) for name in fc.__all__ if isinstance(getattr(fc, name), type)}
    fields = {name: list(kind.model_fields) for name, kind in classes.items() if issubclass(kind, BaseModel)}
    made = {name: kind for name, kind in classes.items() if dataclasses.is_dataclass(kind)}
    return fields | {name: [field.name for field in dataclasses.fields(kind)] for name, kind in made.items()}


def construct(name: str, field: str, value: Any) -> object:
    return getattr(fc, name)(**{**CONSTRUCTED[name], field: value})


FIELDS = [(name, field) for name, fields in constructed().items() for field in [*fields, "no such field"]]


def test_every_public_name_is_driven() -> None:
    errors = {
        name for name in fc.__all__ if isinstance(getattr(fc, name), type) and issubclass(getattr(fc, name), Exception)
    }
    assert sorted(fc.__all__) == sorted({*CALLS, *CONSTRUCTED, *OTHERS, *errors})
    assert sorted(constructed()) == sorted(CONSTRUCTED)


@pytest.mark.parametrize("name", CONSTRUCTED)
def test_the_fields_that_are_driven_are_accepted(name: str) -> None:
    getattr(fc, name)(**CONSTRUCTED[name])


def raw_errors(call: Call, skip: Callable[[Any], bool]) -> dict[str, str]:
    """What is neither accepted nor refused by name: hostile value -> the error."""
    raw = dict[str, str]()
    for what, value in HOSTILE.items():
        if skip(value):
            continue
        try:
            call(value)
        except UserError as error:
            if not error.hint and not any(problem.hint for problem in error.problems):
                raw[what] = f"no hint: {error.what}"
        except Exception as error:
            raw[what] = f"{type(error).__name__}: {error}"
    return raw


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_a_hostile_field_works_or_is_refused_by_name(name: str, field: str) -> None:
    raw = raw_errors(lambda value: construct(name, field, value), lambda value: False)
    assert not raw, "\n".join(f"{what}: {text[:200]}" for what, text in raw.items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name, arguments in CALLS.items() for argument in arguments]
)
def test_a_hostile_value_works_or_is_refused_by_name(
    name: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # What a caller's own function raises is the caller's.
    raw = raw_errors(CALLS[name][argument], lambda value: argument in FUNCTIONS and callable(value))
    assert not raw, "\n".join(f"{what}: {text[:200]}" for what, text in raw.items())
