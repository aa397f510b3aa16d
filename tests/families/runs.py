"""How a case is compiled and decoded."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import decoders
import numpy as np
import pytest
import torch
from torch import Tensor

import fastcar_compile as fc
from fastcar_compile.runtime.backends.eager import EagerStepper
from fastcar_compile.runtime.session import Session

from .case import BATCH, CHUNK, VOCAB, WIDTH, Case
from .reference import Run

TOLERANCE = {"float32": 2e-5, "float16": 5e-4, "bfloat16": 4e-3, "int8": 1e-2}
"""KV type -> greatest difference of a logit. A key near the middle of two stored values may round the other way."""


def inputs_of(case: Case) -> Tensor:
    """Return the sequence of a case: token ids, or embeddings of a headless decoder."""
    generator = torch.Generator().manual_seed(1)
    if case.headless:
        return torch.randn(BATCH, case.length, WIDTH, generator=generator)
    ids = torch.randint(0, VOCAB, (BATCH, case.length), generator=generator)
    if case.classes:
        ids[:, 0] = VOCAB + torch.arange(BATCH) % case.classes
    return ids


def warned(case: Case) -> AbstractContextManager[object]:
    """Return a context that asserts the compiler's warning of a case, if there is one."""
    return nullcontext() if case.warned is None else pytest.warns(UserWarning, match=case.warned)


def compiled(case: Case, output: Path, target: str = "cpu", quant: str = "none", chunk: int = CHUNK) -> fc.Artifact:
    """Return the artifact of a case, whose warning is asserted."""
    with warned(case):
        offload = None if target == "cpu" else "mlp"
        return fc.compile(
            case.build(), target, quant=quant, offload=offload, tokens_per_frame=case.frame, max_seq_len=case.length,
            batch_size=BATCH, prefill_chunk=chunk, kv=case.kv, replay=fc.ReplayConfig(gate=case.gate), output=output,
        )  # fmt: skip


def rewritten(case: Case) -> Session:
    """Return a session over the rewritten graph in eager PyTorch. Nothing is lowered, so this takes a second."""
    replay = fc.ReplayConfig(gate=case.gate)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"{case.warned}.*")  # some come before the program, some behind it
        program = decoders.rewritten(
            case.build(), CHUNK, tokens_per_frame=case.frame, max_seq_len=case.length, batch_size=BATCH, replay=replay,
            kv=case.kv,
        )  # fmt: skip
    thresholds = replay.thresholds(len(program.sites))
    return Session(EagerStepper(program), program.config, thresholds, record=True, gate=case.gate)


def decode(session: Session, case: Case, inputs: Tensor) -> Tensor:
    """Return the logits [B, T, V] from the prompt's last token on."""
    session.reset()
    if case.context is not None:
        session.set_context(*case.context())
    out = [session.prefill(inputs[:, : case.prompt])]
    return torch.stack(out + [session.step(inputs[:, i]) for i in range(case.prompt, case.length)], 1)


def check(session: Session, case: Case, plain: Run, replay: Run) -> None:
    """Decode dense and with replay: logits are those of the reference, and every decision is.

    Args:
        session: a recording one. plain, replay: what the reference did.
    """
    inputs = inputs_of(case)
    session.set_threshold(None)
    _within(decode(session, case, inputs), plain.logits, case)
    session.set_threshold(replay.thresholds)
    found = decode(session, case, inputs)
    expected = np.stack([one.numpy() for one in replay.decisions], 1)
    flipped = int((session.stats.decisions != expected).sum())
    assert flipped == 0, f"{flipped} of {expected.size} decisions are flipped"
    _within(found, replay.logits, case)


def _within(found: Tensor, expected: Tensor, case: Case) -> None:
    torch.testing.assert_close(found, expected[:, case.prompt - 1 :].float(), atol=TOLERANCE[case.kv], rtol=0)
