"""Messages of a player's page, one a line, to a game whose decoder is a stand-in; and headers of a request."""

import warnings
from typing import Any

import numpy as np
from play.worlds import FRAME, write_world
from starlette.datastructures import Headers

from fastcar_compile.errors import InputError
from fastcar_compile.ir.types import DecoderConfig
from fastcar_compile.runtime.backends.base import Array, OpenStepper, Stepper, StepResult
from fastcar_compile.runtime.session import Session
from fastcar_play.game import Replayable, Stage
from fastcar_play.messages import Request, parse_request
from fastcar_play.pixels import Pixels
from fastcar_play.server import OwnNames, same_origin
from fastcar_play.track import Opener, Watch
from fastcar_play.visit import Visit
from fastcar_play.world import load_world
from fuzz.expect import Finding, accepted, folder, same

VOCABULARY, LAYERS, POSITIONS = 16, 2, 60
LOGITS = np.random.default_rng(0).normal(size=(POSITIONS, 1, VOCABULARY)).astype(np.float32)
OWN = OwnNames.of("127.0.0.1")
FRAMES = 3
"""Turns of the game after the messages."""

MESSAGES = 50
"""Of one input at most."""

warnings.simplefilter("error", RuntimeWarning)  # what numpy warns of is a finding


class StandIn(Stepper):
    """Logits that depend on the position, and scores that depend on the step."""

    def __init__(self) -> None:
        self.prefill_chunk = 1

    def reset(self) -> None:
        """It has no state."""

    def prefill(self, inputs: Array, position: int) -> Array:
        """Return the logits of a position."""
        return LOGITS[None, position : position + inputs.shape[1], 0]

    def decode(self, inputs: Array, position: Any, step: Any, thresholds: Array) -> StepResult:
        """Return the logits of a position, and replay where the score passes."""
        scores = np.full((LAYERS, 1), step % 7, np.float32)
        return StepResult(LOGITS[None, position], scores <= thresholds[:, None], scores)


class StandInOpener(Opener):
    """Opens sessions of the stand-in."""

    def __call__(self) -> tuple[Session, Watch]:
        """Return a session and what watches it."""
        config = DecoderConfig(1, POSITIONS, FRAME, LAYERS, 64, VOCABULARY, False, 1)
        watch = Watch(StandIn())
        return Session(watch, config, [3.0] * LAYERS, gate="input_delta"), watch


def _no_session(backend: OpenStepper, *, threads: int | None) -> Session:
    raise AssertionError("there is no artifact")


class Scripted(Visit):
    """A visit that gets its messages at once, and ends some turns later."""

    script: list[list[Request]]

    def _next(self) -> list[Request] | None:
        return self.script.pop(0) if self.script else None


def _stage() -> Stage:
    world = load_world(write_world(folder() / "game"))
    replay = Replayable((3.0,) * LAYERS, (None, 1.0))
    return Stage("a", "input_delta", (1.0,) * LAYERS, world, Pixels(world, 1), StandInOpener(_no_session), replay)


_STAGE = _stage()


def run(data: bytes) -> bool:
    """Read the lines, and play with those that are messages; True if all are."""
    found = [_read(line) for line in data.split(b"\n")[:MESSAGES]]
    sent: list[str | bytes] = []
    visit = Scripted(_STAGE, sent.append, lambda: False)
    visit.script = [[request for request in found if request is not None], *([] for _ in range(FRAMES))]
    visit.run()
    if wrong := [item for item in sent if isinstance(item, str) and "internal error" in item]:
        raise Finding(wrong[0])
    return None not in found


def _read(line: bytes) -> Request | None:
    headers = Headers(raw=[(b"host", line), (b"origin", b"http://" + line)])
    OWN.has(headers["host"])
    same_origin(headers)
    text = line.decode("utf-8", "replace")
    request = accepted(InputError, lambda: parse_request(text))
    if request is not None:
        same(parse_request(request.model_dump_json()), request, "the message that is written again")
    return request
