"""What a visitor's page and the server say to each other. A message of a page is JSON; a picture has JSON in front."""

import struct
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fastcar_compile.errors import InputError, describe_validation
from fastcar_compile.support.values import parse_json
from fastcar_play import limits
from fastcar_play.game import Beginning, Mode, Side


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Name = Annotated[str, Field(max_length=80)]


class Keys(_Message):
    """The buttons that are held now."""

    type: Literal["keys"]
    held: Annotated[list[Name], Field(max_length=limits.BUTTONS)]


class Drawn(_Message):
    """The page has drawn a frame, and takes another one. serial: of the frame's header."""

    type: Literal["drawn"]
    serial: Annotated[int, Field(ge=0, lt=limits.SIZE)]


class Run(_Message):
    """Play, or pause."""

    type: Literal["run"]
    value: bool


class Visible(_Message):
    """Whether somebody sees the page."""

    type: Literal["visible"]
    value: bool


class SetMode(_Message):
    """Dense, replay, or both side by side."""

    type: Literal["mode"]
    value: Annotated[Mode, Field(strict=False)]


class SetThreshold(_Message):
    """Another threshold for all layers. None: never. "compiled": those of the artifact."""

    type: Literal["threshold"]
    value: Annotated[float, Field(allow_inf_nan=False)] | Literal["compiled"] | None


class Restart(_Message):
    """A new game; see Beginning."""

    type: Literal["restart"]
    start: Annotated[int, Field(ge=0, lt=limits.SIZE)]
    seed: Annotated[int, Field(ge=0, lt=1 << 53)]
    temperature: Annotated[float, Field(ge=0, le=limits.TEMPERATURE, allow_inf_nan=False)]
    top_k: Annotated[int, Field(ge=0, lt=limits.SIZE)]

    def beginning(self) -> Beginning:
        """Return how the game is to begin."""
        return Beginning(self.start, self.seed, self.temperature, self.top_k)


class Limit(_Message):
    """At most the world's frames per second, or as many as this machine generates."""

    type: Literal["limit"]
    value: bool


class Record(_Message):
    """Begin a recording, or end it and send it."""

    type: Literal["record"]
    value: bool


Request = Keys | Drawn | Run | Visible | SetMode | SetThreshold | Restart | Limit | Record
_REQUEST = TypeAdapter[Request](Annotated[Request, Field(discriminator="type")])


def parse_request(text: str) -> Request:
    """Return a message of a page.

    Raises:
        InputError: it is none.
    """
    try:
        value = parse_json(text.encode("utf-8", "replace"), size=limits.MESSAGE_BYTES)
        return _REQUEST.validate_python(value)
    except ValidationError as error:
        lines = describe_validation(error)
        raise InputError(f"the message is malformed: {lines[: limits.TEXT_ERROR]}") from error
    except ValueError as error:
        raise InputError(f"the message is no JSON: {str(error)[: limits.TEXT_ERROR]}") from error


class ButtonPart(_Message):
    """One button: its name, and the KeyboardEvent.code values that press it."""

    name: str
    keys: tuple[str, ...]


class Hello(_Message):
    """What a page shows; the first message.

    Args:
        artifact, gate, spared: see Stage. size, aspect, grid: see Image. levels: see Replayable.
        record_frames: of one recording.
    """

    type: Literal["hello"] = "hello"
    world: str
    artifact: str
    gate: str | None
    spared: tuple[float, ...]
    tokens_per_frame: int
    frames_per_second: float
    size: tuple[int, int]
    aspect: tuple[int, int]
    grid: tuple[int, int]
    buttons: tuple[ButtonPart, ...]
    starts: tuple[str, ...]
    codes: int
    levels: tuple[float | None, ...]
    record_frames: int


class Status(_Message):
    """How the game stands; sent whenever something of it has changed.

    Args:
        threshold: one for all layers; "compiled": those of the artifact; None: never.
        limited: at most the world's frames per second.
        recorded: frames of the recording; None: there is no recording.
        note: something to tell the player.
    """

    type: Literal["status"] = "status"
    running: bool
    mode: Mode
    threshold: float | Literal["compiled"] | None
    start: int
    seed: int
    temperature: float
    top_k: int
    limited: bool
    recorded: int | None
    note: str = ""


class Full(_Message):
    """All places are taken."""

    type: Literal["full"] = "full"
    visitors: int


class Ended(_Message):
    """The game has ended, and why."""

    type: Literal["ended"] = "ended"
    reason: str


class SideHeader(_Message):
    """One picture of a frame.

    Args:
        bytes: of its PNG. token_ms: of one forward. sampling_ms: of the whole frame's draws.
        codes: of its tokens in raster order.
        replayed: per token in raster order, the share of layers that replayed, in percent; empty for a start.
        by_layer: per layer, the share of tokens at which it replayed; empty for a start.
    """

    side: Side
    bytes: int
    token_ms: float | None
    sampling_ms: float | None
    codes: tuple[int, ...]
    replayed: tuple[int, ...]
    by_layer: tuple[float, ...]


class FrameHeader(_Message):
    """What stands in front of a frame's pictures.

    Args:
        serial: for `Drawn`. number: of the frame in the game.
        fps: frames per second lately; None: not known yet. pixels_ms, png_ms: of all its pictures.
        refilled: a session was full, and has read the last frames again.
    """

    type: Literal["frame"] = "frame"
    serial: int
    number: int
    action: str
    fps: float | None
    pixels_ms: float
    png_ms: float
    refilled: bool
    recorded: int | None
    sides: tuple[SideHeader, ...]


class RecordingHeader(_Message):
    """What stands in front of a recording."""

    type: Literal["recording"] = "recording"
    name: str
    frames: int


def packed(header: FrameHeader | RecordingHeader, parts: Sequence[bytes]) -> bytes:
    """Return a binary message: length of the header as uint32, little endian; the header as JSON; the parts."""
    text = header.model_dump_json().encode("utf-8")
    return b"".join([struct.pack("<I", len(text)), text, *parts])
