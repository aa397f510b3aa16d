"""A recorded game: how it began, the actions, and a running hash of every bit that was generated from them.

Exact numerics define those bits, so a game that was recorded on one machine is verified on every other one, also by
`game.mjs` in a browser or in Node. A minute of Doom takes about two kilobytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import fastcar_compile as fc
from fastcar_compile.errors import InputError, describe_validation
from fastcar_compile.runtime.backends import OpenStepper
from fastcar_compile.support.values import parse_json
from fastcar_play import limits
from fastcar_play.game import Beginning
from fastcar_play.track import Opener, Step, Track
from fastcar_play.world import World, content

HINT = "docs/tutorial/play.md describes recorded games"
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_RUNS = re.compile(r"\d{1,6}(\*\d{1,6})?")

Threshold = Annotated[float, Field(allow_inf_nan=False)] | None


class RecordedGame(BaseModel):
    """The content of a recorded game.

    Args:
        format: 2: draws by position; 1 was of other draws.
        world: its name. weights: of the artifact, see `weights_digest`.
        start, seed, temperature, top_k: see Beginning. thresholds: one per layer; None: never.
        actions: tokens of the actions, "1003*12 1001": twelve frames of one, then one of another.
        checks: a character for each frame, six bits of the hash up to it. digest: the hash of the whole game.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Annotated[int, Field(ge=2, le=2)] = 2
    world: str
    weights: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    start: Annotated[int, Field(ge=0, lt=limits.SIZE)]
    seed: Annotated[int, Field(ge=0, lt=1 << 53)]
    temperature: Annotated[float, Field(ge=0, le=limits.TEMPERATURE, allow_inf_nan=False)]
    top_k: Annotated[int, Field(ge=0, lt=limits.SIZE)]
    thresholds: Annotated[tuple[Threshold, ...], Field(strict=False)]
    actions: Annotated[str, Field(max_length=limits.GAME_BYTES)]
    checks: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]*$")]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        if wrong := [run for run in self.actions.split() if not _RUNS.fullmatch(run)]:
            raise ValueError(f"{wrong[0][: limits.TEXT_ERROR]!r} is no run of an action")
        if (frames := sum(count for _, count in self._runs())) != len(self.checks):
            raise ValueError(f"there are {frames} actions and {len(self.checks)} checks")
        return self

    def _runs(self) -> Iterator[tuple[int, int]]:
        for run in self.actions.split():
            token, _, count = run.partition("*")
            yield int(token), int(count or 1)

    def tokens(self) -> list[int]:
        """Return the action token of every frame."""
        return [token for token, count in self._runs() for _ in range(count)]


class Ledger:
    """The running hash of a game: SHA-256 of the hash before, and a frame's tokens, scores and logits.

    Attributes:
        digest: of the frames up to now.
    """

    def __init__(self) -> None:
        self.digest = bytes(32)

    def add(self, action: int, step: Step) -> str:
        """Add a frame; return its check."""
        tokens = np.array([action, *step.codes], "<i4")
        parts = (tokens, step.scores.astype("<f4"), step.logits.astype("<f4"))
        self.digest = hashlib.sha256(self.digest + b"".join(part.tobytes() for part in parts)).digest()
        return _ALPHABET[self.digest[0] & 63]


def weights_digest(artifact: fc.Artifact) -> str:
    """Return the SHA-256 of the checksums of an artifact's weight files, in hexadecimal, in their order."""
    files = artifact.manifest.files
    texts = (files[name].sha256 for name in sorted(files) if re.match(r"weights/model.*\.safetensors$", name))
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def recorded(artifact: fc.Artifact, world: World, beginning: Beginning, actions: Iterable[int]) -> RecordedGame:
    """Play a game with the artifact's thresholds, and return its record.

    Args:
        actions: the token of each frame.

    Raises:
        InputError: the artifact has other numerics than exact ones, or there is no such start.
    """
    thresholds = tuple(artifact.manifest.layers.thresholds)
    played, ledger = list(actions), Ledger()
    checks = [check for check, _ in _played(artifact, world, beginning, thresholds, played, ledger)]
    runs = ((token, len(list(group))) for token, group in groupby(played))
    return RecordedGame(
        world=world.file.name,
        weights=weights_digest(artifact),
        start=beginning.start,
        seed=beginning.seed,
        temperature=beginning.temperature,
        top_k=beginning.top_k,
        thresholds=thresholds,
        actions=" ".join(f"{token}*{count}" if count > 1 else f"{token}" for token, count in runs),
        checks="".join(checks),
        digest=ledger.digest.hex(),
    )


def verify(artifact: fc.Artifact, world: World, game: RecordedGame, backend: str | OpenStepper = "cpu") -> float:
    """Play a recorded game again; return the share of the MLPs that replayed. backend: see `Artifact.session`.

    Raises:
        InputError: it is of another world or decoder, or a frame has other bits.
    """
    for name, own, theirs in (
        ("world", world.file.name, game.world),
        ("decoder", weights_digest(artifact), game.weights),
        ("number of layers", artifact.config.num_layers, len(game.thresholds)),
    ):
        if own != theirs:
            raise InputError(
                f"the game was recorded with another {name}", hint="give the artifact that it was played with"
            )
    beginning = Beginning(game.start, game.seed, game.temperature, game.top_k)
    ledger, shares = Ledger(), list[float]()
    for found, step in _played(artifact, world, beginning, game.thresholds, game.tokens(), ledger, backend):
        if found != game.checks[len(shares)]:
            raise _differs(f"frame {len(shares) + 1} of {len(game.checks)}")
        shares.append(float(step.decisions.mean()))
    if ledger.digest.hex() != game.digest:
        raise _differs("a late frame")
    return sum(shares) / max(1, len(shares))


def _differs(what: str) -> InputError:
    hint = "the artifact, the package or this machine computes something else than when it was recorded"
    return InputError(f"{what} has other bits than the recorded game", hint=hint)


def _played(
    artifact: fc.Artifact,
    world: World,
    beginning: Beginning,
    thresholds: tuple[Threshold, ...],
    actions: Iterable[int],
    ledger: Ledger,
    backend: str | OpenStepper = "cpu",
) -> Iterator[tuple[str, Step]]:
    """Yield check and frame of every action."""
    if artifact.manifest.options.numerics != "exact":
        hint = 'compile it with numerics="exact" and kv="int8"'
        raise InputError("a recorded game needs a decoder whose numerics are exact", hint=hint)
    if not 0 <= beginning.start < len(world.starts):
        raise InputError(f"there is no start {beginning.start}", hint=f"choose one of {len(world.starts)}, from 0")
    known = {action.token for action in world.file.actions}
    track = Track(world, Opener(artifact.session, backend, threads=1))
    try:
        track.begin(world.starts[beginning.start], beginning.sampling(world.file.image.count))
        track.set_threshold(list(thresholds))
        for action in actions:
            if action not in known:
                raise InputError(f"the world has no action {action}", hint=HINT)
            step = track.frame(action)
            yield ledger.add(action, step), step
    finally:
        track.close()


def load_game(path: Path) -> RecordedGame:
    """Read a recorded game.

    Raises:
        InputError: the file is missing, too large or malformed.
    """
    data = content(path, limits.GAME_BYTES, "recorded game", HINT)
    try:
        return RecordedGame.model_validate(parse_json(data, size=limits.GAME_BYTES))
    except ValidationError as error:
        lines = describe_validation(error)[: limits.TEXT_ERROR]
        raise InputError(f"the recorded game is malformed: {lines}", where=str(path), hint=HINT) from error
    except (ValueError, RecursionError) as error:
        text = str(error)[: limits.TEXT_ERROR]
        raise InputError(f"the recorded game is no JSON: {text}", where=str(path), hint=HINT) from error
