"""A world's folder: what its tokens mean, the buttons of the player, and contexts to start from."""

import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from fastcar_compile.errors import ArtifactError, InputError, describe_validation
from fastcar_compile.ir.tensor_files import tensors_of
from fastcar_compile.ir.types import DecoderConfig
from fastcar_compile.support.values import file_bytes, parse_json, path_of
from fastcar_play import limits

WORLD, STARTS, PIXELS = "world.toml", "starts.safetensors", "pixels.onnx"
HINT = "docs/tutorial/play.md describes the files of a world"

Tokens = NDArray[np.int64]
Label = Annotated[str, StringConstraints(min_length=1, max_length=80, pattern=r"^[^\x00-\x1f\x7f]+$")]
Token = Annotated[int, Field(ge=0, lt=limits.SIZE)]
Side = Annotated[int, Field(ge=1, le=limits.PICTURE_SIDE)]


_PARTS = 8
"""A pixel on the screen is at most so many times as wide as high, or as high as wide."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Image(_Part):
    """The image tokens of a frame.

    Args:
        offset: decoder token of image code 0. count: image codes.
        grid: rows and columns of tokens. size: height and width of a frame in pixels.
        aspect: width and height of the picture on the screen, as a ratio.
    """

    offset: Token
    count: Annotated[int, Field(ge=2, lt=limits.SIZE)]
    grid: Annotated[tuple[Side, Side], Field(strict=False)]
    size: Annotated[tuple[Side, Side], Field(strict=False)]
    aspect: Annotated[tuple[Side, Side], Field(strict=False)]

    @property
    def tokens(self) -> int:
        """Image tokens of a frame."""
        return self.grid[0] * self.grid[1]

    @property
    def pixel_shape(self) -> tuple[int, int]:
        """Width and height of one pixel on the screen, in small whole numbers."""
        ratio = Fraction(self.aspect[0] * self.size[0], self.aspect[1] * self.size[1]).limit_denominator(_PARTS)
        return ratio.numerator, ratio.denominator

    @model_validator(mode="after")
    def _is_a_picture(self) -> Self:
        shape = self.aspect[0] * self.size[0] / (self.aspect[1] * self.size[1])
        if not 1 / _PARTS <= shape <= _PARTS:
            raise ValueError(f"the aspect makes a pixel {shape:.3g} times as wide as high")
        return self


class SamplingDefaults(_Part):
    """How image tokens are drawn unless the player chooses otherwise. top_k: 0 for all codes."""

    temperature: Annotated[float, Field(ge=0, le=limits.TEMPERATURE, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=limits.SIZE)] = 0

    @field_validator("temperature")
    @classmethod
    def _divides(cls, value: float) -> float:
        if 0 < value < limits.LEAST_TEMPERATURE:
            raise ValueError(f"it is 0 (the likeliest code), or at least {limits.LEAST_TEMPERATURE:g}")
        return value


class Action(_Part):
    """What a frame is made under. token: its decoder token. buttons: those that are held."""

    token: Token
    name: Label
    buttons: Annotated[frozenset[Label], Field(strict=False)]


class WorldFile(_Part):
    """The content of world.toml.

    Args:
        tokens_per_frame: the action token and the image tokens.
        context_frames: frames of a start.
        frames_per_second: of the recorded game, and of the live one unless the player lifts the limit.
        buttons: name -> values of KeyboardEvent.code that press it.
    """

    format: Annotated[int, Field(ge=1, le=1)]
    name: Label
    tokens_per_frame: Annotated[int, Field(ge=2, le=limits.SIZE)]
    context_frames: Annotated[int, Field(ge=1, le=limits.START_FRAMES)]
    frames_per_second: Annotated[float, Field(gt=0, le=limits.FRAMES_PER_SECOND, allow_inf_nan=False)]
    image: Image
    sampling: SamplingDefaults = SamplingDefaults()
    buttons: Annotated[dict[Label, list[Label]], Field(max_length=limits.BUTTONS)]
    actions: Annotated[tuple[Action, ...], Field(strict=False, min_length=1, max_length=limits.ACTIONS)]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.tokens_per_frame != self.image.tokens + 1:
            raise ValueError(f"a frame is an action token and {self.image.tokens} image tokens")
        if unknown := sorted({b for action in self.actions for b in action.buttons} - self.buttons.keys()):
            raise ValueError(f"the actions name unknown buttons: {', '.join(unknown)}")
        if all(action.buttons for action in self.actions):
            raise ValueError("one action must have no buttons: it is the answer where nothing is held")
        image = range(self.image.offset, self.image.offset + self.image.count)
        if bad := [action.name for action in self.actions if action.token in image]:
            raise ValueError(f"the token of {bad[0]!r} is one of an image")
        return self

    def action(self, held: Collection[str]) -> Action:
        """Return the action with the most buttons whose buttons are all held; the first listed one of several."""
        possible = [action for action in self.actions if action.buttons <= set(held)]
        return max(possible, key=lambda action: len(action.buttons))


@dataclass(frozen=True)
class World:
    """A world, read and checked.

    Args:
        file: world.toml. starts: token ids [S, frames, tokens per frame]. names: of the starts.
        pixels: the bytes of pixels.onnx, which turns image codes into frames.
    """

    folder: Path
    file: WorldFile
    starts: Tokens = field(repr=False)
    names: tuple[str, ...]
    pixels: bytes = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return what `game.mjs` calls a world."""
        return self.file.model_dump(mode="json") | {"starts": self.starts.tolist(), "names": self.names}

    def check_decoder(self, config: DecoderConfig) -> None:
        """Raise InputError unless the decoder can be one of this world."""
        file, where = self.file, str(self.folder / WORLD)
        hint = "compile the decoder of this world, with its tokens per frame"
        highest = max(file.image.offset + file.image.count - 1, *(action.token for action in file.actions))
        problems = [
            (config.takes_embeddings or config.vocab_size is None, "the decoder has no tokens in or out"),
            (config.context is not None, "the decoder reads a context, which a world does not have"),
            (config.batch_size != 1, f"the decoder has {config.batch_size} rows; a game is one"),
            (
                config.tokens_per_frame != file.tokens_per_frame,
                f"the decoder has {config.tokens_per_frame} tokens per frame, the world {file.tokens_per_frame}",
            ),
            (
                highest >= (config.vocab_size or 0),
                f"the world has token {highest}, the decoder {config.vocab_size} tokens",
            ),
            (
                config.max_seq_len < 2 * file.tokens_per_frame,
                f"the decoder has {config.max_seq_len} positions, and two frames take {2 * file.tokens_per_frame}",
            ),
        ]
        for wrong, what in problems:
            if wrong:
                raise InputError(what, where=where, hint=hint)


def load_world(folder: str | Path) -> World:
    """Read a world's folder.

    Raises:
        InputError: a file is missing, too large or malformed, or the files do not fit together.
    """
    path = path_of("the world", folder)
    file = _world_file(path / WORLD)
    starts, names = _starts(path / STARTS, file)
    return World(path, file, starts, names, content(path / PIXELS, limits.PIXELS_BYTES, f"world's {PIXELS}"))


def content(path: Path, most: int, what: str, hint: str = HINT) -> bytes:
    """Return the bytes of a file, `what` by name.

    Raises:
        InputError: it cannot be read, or has more than `most` bytes.
    """
    try:
        return file_bytes(path, most)
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or error
        raise InputError(f"the {what} cannot be read: {text}", where=str(path), hint=hint) from error


def _world_file(path: Path) -> WorldFile:
    try:
        return WorldFile.model_validate(
            tomllib.loads(content(path, limits.TOML_BYTES, f"world's {path.name}").decode("utf-8"))
        )
    except ValidationError as error:
        lines = describe_validation(error)[: limits.TEXT_ERROR]
        raise InputError(f"the world file is malformed: {lines}", where=str(path), hint=HINT) from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, a number of too many digits
        text = str(error)[: limits.TEXT_ERROR]
        raise InputError(f"the world file cannot be read: {text}", where=str(path), hint=HINT) from error


class _Metadata(BaseModel):
    """What the header of a safetensors file says besides its tensors."""

    names: Annotated[str, Field(validation_alias=AliasPath("__metadata__", "names"))]


_NAMES = TypeAdapter(tuple[Label, ...])


def _starts(path: Path, file: WorldFile) -> tuple[Tokens, tuple[str, ...]]:
    data = content(path, limits.STARTS_BYTES, f"world's {path.name}")
    try:
        tokens = tensors_of(np.frombuffer(data, np.uint8), str(path)).get("tokens")
        names = _names(data)
    except ArtifactError as error:
        raise InputError(error.what, where=str(path), hint=HINT) from error
    except (ValueError, RecursionError) as error:  # a ValidationError too
        raise InputError("the names of the starts cannot be read", where=str(path), hint=HINT) from error
    expected = (file.context_frames, file.tokens_per_frame)
    if (
        tokens is None
        or tokens.dtype != np.int64
        or tokens.ndim != 3
        or tokens.shape[1:] != expected
        or not len(tokens)
    ):
        found = "nothing" if tokens is None else f"{tokens.dtype} {list(tokens.shape)}"
        what = f"the starts hold {found} under 'tokens', expected int64 [S, {expected[0]}, {expected[1]}]"
        raise InputError(what, where=str(path), hint=HINT)
    _check_tokens(tokens, file, path)
    if len(names) != len(tokens):
        raise InputError(f"there are {len(names)} names of {len(tokens)} starts", where=str(path), hint=HINT)
    return tokens, names


def _names(data: bytes) -> tuple[str, ...]:
    header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return _NAMES.validate_python(parse_json(_Metadata.model_validate(header).names.encode("utf-8")))


def _check_tokens(tokens: Tokens, file: WorldFile, path: Path) -> None:
    """Raise InputError unless every frame is an action and codes of images."""
    codes = tokens[..., 1:] - file.image.offset
    actions = np.isin(tokens[..., 0], [action.token for action in file.actions])
    if not actions.all() or codes.min() < 0 or codes.max() >= file.image.count:
        what = "a frame of the starts is not an action token and image tokens behind it"
        raise InputError(what, where=str(path), hint=HINT)
