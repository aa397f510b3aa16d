"""A session in a file: every state that its tokens have written, and where it stands."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fastcar_compile.artifact.digest import DIGEST_PATTERN
from fastcar_compile.artifact.sections import State
from fastcar_compile.config.formats import KV_TYPES
from fastcar_compile.errors import ArtifactError, describe_validation, os_errors
from fastcar_compile.ir.types import ATTENTION_ROLES, DecoderConfig, StateRole
from fastcar_compile.runtime.backends.base import Array
from fastcar_compile.runtime.progress import NEVER, Progress
from fastcar_compile.support import limits
from fastcar_compile.support.files import replacing
from fastcar_compile.support.values import read_arrays

_ABOUT = "about"
_HINT = "give a file that `Session.save` wrote"

_Count = Annotated[int, Field(ge=0, le=limits.SIZE)]


class SavedSession(BaseModel):
    """What a session file says beside its arrays.

    Args:
        digest: of the artifact. position: of the next token. first: position of the first decode forward.
        forwards, eligible: of the statistics. context: the context of cross-attention is among the states.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = 1
    digest: str = Field(pattern=f"^$|{DIGEST_PATTERN}")
    position: _Count
    first: _Count | None
    forwards: _Count
    eligible: _Count
    context: bool


def write_session(file: Path, about: SavedSession, arrays: Mapping[str, Array]) -> None:
    """Write a .npz file, whatever its name; it replaces an old one once it is whole.

    Raises:
        UserError: it cannot be written.
    """
    # numpy has no bfloat16 of its own: its bits are stored.
    plain: dict[str, Any] = {n: a if a.dtype.isbuiltin == 1 else a.view(np.uint16) for n, a in arrays.items()}
    plain[_ABOUT] = np.frombuffer(about.model_dump_json().encode(), np.uint8)
    with os_errors("the session cannot be saved", file), replacing(file) as stream:
        np.savez(stream, **plain)


def read_session(
    file: Path, digest: str, config: DecoderConfig, states: Sequence[State], at: Progress
) -> tuple[SavedSession, dict[str, Array]]:
    """Return a saved session of the artifact with this digest, and its arrays, bfloat16 as uint16; all are checked.

    Args:
        states: every state of the decoder. at: of a session that has just begun; it is put where the saved one stood.

    Raises:
        InputError: the file cannot be read. ArtifactError: it is no session, or of another artifact, or says what no
            session can be.
    """
    # At most decisions at every position, and a KiB for the headers of each array.
    most = (config.max_seq_len + 32) * (config.num_layers * config.batch_size + 8) + 8 * config.tokens_per_frame
    most += sum(state.nbytes + 1024 for state in states) + limits.MIB
    arrays = read_arrays(file, "session", _HINT, most)
    if (said := arrays.pop(_ABOUT, None)) is None or said.dtype != np.uint8:
        raise ArtifactError("this file is no session", where=str(file), hint=_HINT)
    try:
        about = SavedSession.model_validate_json(said.tobytes())
    except ValidationError as error:
        what = f"the session is malformed: {describe_validation(error)}"
        raise ArtifactError(what, where=str(file), hint=_HINT) from error
    if about.digest != digest:
        what = f"the session is of the artifact {about.digest}, this one is {digest}"
        raise ArtifactError(what, where=str(file), hint="open the artifact that it was saved with")
    if config.rows is None:
        arrays.setdefault("behind", at.behind)  # files of earlier versions have none
    # A check relies on those before it, so the first problem is the only one.
    if (problem := next(_problems(about, arrays, config, states, at), None)) is not None:
        raise ArtifactError(f"the session is malformed: {problem}", where=str(file), hint=_HINT)
    return about, arrays


def _problems(
    about: SavedSession, arrays: dict[str, Array], config: DecoderConfig, states: Sequence[State], at: Progress
) -> Iterator[str]:
    """Yield what is wrong with a session's numbers and arrays, and put `at` where they say once these are right."""
    begun = at.saved()[1] | {"thresholds": np.empty(config.num_layers, np.float32)}
    names = {*begun, *(f"state.{state.name}" for state in states)}
    yield from (f"{name} is missing" for name in sorted(names - set(arrays)))
    yield from (f"{name!r:.80} is unknown" for name in sorted(set(arrays) - names))
    for name, array in begun.items():
        # A session that has begun has recorded nothing.
        shape = array.shape if array.size else (arrays["places"].size, *array.shape[1:])
        yield from _wrong_form(name, arrays[name], array.dtype, shape)
    yield from _wrong_counts(about, arrays, config)
    at.restore(about.position, about.first, about.forwards, about.eligible, arrays)
    parts = at.filled(states)
    for state in states:
        values, own, part = arrays[f"state.{state.name}"], state.format.numpy, parts[state.name]
        expected = np.broadcast_to(np.int8(0), state.shape)[part].shape
        yield from _wrong_form(f"state.{state.name}", values, own if own.isbuiltin == 1 else np.dtype("u2"), expected)
        yield from _wrong_values(state, values.view(own))
        if state.role is StateRole.CHAIN_COUNT:
            # A chain is no longer than the frames in which its slot was decoded.
            most = at.slots.last[part] // config.tokens_per_frame
            yield from _outside(f"state.{state.name}", values, 0, most.reshape(-1, *[1] * (values.ndim - 1)))


def _wrong_form(name: str, array: Array, dtype: Any, shape: tuple[int, ...]) -> Iterator[str]:
    # Another byte order is another dtype, and one value for all is another shape.
    if (array.dtype, array.shape) != (dtype, shape):
        yield f"{name} is {array.dtype!s:.80} {list(array.shape)}, expected {np.dtype(dtype)} {list(shape)}"


def _outside(name: str, given: Any, least: Any, most: Any) -> Iterator[str]:
    """Yield the first of some whole numbers that is outside of its range."""
    values, least, most = np.broadcast_arrays(given, least, most)
    for index in np.argwhere((values < least) | (values > most))[:1]:
        at, place = tuple(index), index.tolist() or ""
        yield f"{name}{place} is {values[at]}, expected {least[at]} to {most[at]}"


def _wrong_counts(about: SavedSession, arrays: Mapping[str, Array], config: DecoderConfig) -> Iterator[str]:
    position, last, behind, places = about.position, arrays["last"], arrays["behind"], arrays["places"]
    # Until a forward decodes, the next one would be the first.
    decoded, first = int(about.first is not None), position if about.first is None else about.first
    slots, written = np.arange(len(last)), last != NEVER
    yield from _outside("position", position, 0, config.max_seq_len)
    yield from _outside("first", first, 0, position - decoded)
    yield from _outside("forwards", about.forwards, decoded, position - first)
    yield from _outside("eligible", about.eligible, 0, about.forwards)
    yield from _outside("context", int(about.context), 0, int(config.context is not None))
    yield from _outside("last", np.where(written, last, slots), slots, np.where(written, position - first - 1, slots))
    yield from _outside("the slot of last", np.where(written, last % len(slots), slots), slots, slots)
    yield from _outside("the number of slots in last", written.sum(), decoded, about.forwards)
    # Kernels write the next token at row `position - behind` of the caches.
    yield from _outside("behind", behind, 0, 0 if config.rows is None else max(0, position - 1))
    yield from _outside("the least of behind", behind.min(), 0, 0)
    yield from _outside("decisions", arrays["decisions"].view(np.uint8), 0, 1)
    yield from _outside("replays", arrays["replays"], arrays["decisions"].sum(0), about.eligible)
    yield from _outside("places", places, first, position - 1)
    yield from _outside("the number of places", len(places), 0, about.forwards)
    yield from _outside("the number of different places", len(np.unique(places)), len(places), len(places))


def _wrong_values(state: State, values: Array) -> Iterator[str]:
    if state.role in ATTENTION_ROLES and (block := KV_TYPES[state.dtype].block):
        # Exponents stand behind the elements of a row, and the least one says NaN.
        number = values[..., values.shape[-1] // -(block + 1) :] != np.iinfo(values.dtype).min
    else:
        # A mask that is added to logits hides by minus infinity.
        number = np.isfinite(values) | ((state.role is StateRole.CONTEXT_MASK) & (values == -np.inf))
    if not number.all():
        yield f"state.{state.name} holds values that are not finite numbers"
