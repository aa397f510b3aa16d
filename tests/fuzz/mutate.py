"""Changes to inputs that have a structure: to values of a JSON text or of an archive instead of to their bytes."""

import copy
import io
import json
import random
import zipfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

Mutate = Callable[[bytes, int], bytes]
"""The engine's own change of bytes: data, most bytes -> data."""

_HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 1 << 31, 1 << 63, -(1 << 63), 1 << 64, 10**30, 10**400, 0.5, -0.0, 1e308, 1e-320),
    *("", "inf", "-inf", "nan", "0", "../x", "/etc/passwd", "\u0000", "\u001b[2J", "\ud800", "a" * 3000, "sha256:"),
    *([], {}, [[]], [None], {"": None}, [0] * 100, [-1, -1]),
)
_COPIED = 2000
"""Characters of what is copied from elsewhere in the value."""


def json_text(data: bytes, most: int, seed: int, mutate: Mutate) -> bytes:
    """Another JSON text: one to three of its values changed, or the bytes where they are no JSON."""
    draw = random.Random(seed)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return mutate(data, most)
    if draw.random() < 0.1 or not isinstance(value, dict | list):
        return mutate(data, most)
    for _ in range(draw.randint(1, 3)):
        _change(value, draw, mutate)
    text = json.dumps(value, separators=(",", ":")).encode()
    return text if len(text) <= most else mutate(data, most)


def tensor_file(data: bytes, most: int, seed: int, mutate: Mutate) -> bytes:
    """Another safetensors file: its header changed as a JSON text, and mostly of the length that the file says."""
    draw = random.Random(seed)
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or 8 + size > len(data) or draw.random() < 0.2:
        return mutate(data, most)
    header = json_text(data[8 : 8 + size], most - 8, seed, mutate)
    found = len(header).to_bytes(8, "little") + header + data[8 + size :]
    return found if len(found) <= most else mutate(data, most)


def session_file(data: bytes, most: int, seed: int, mutate: Mutate) -> bytes:
    """Another .npz file: one of its arrays changed, left out, or under another's name, with right checksums."""
    draw = random.Random(seed)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # zipfile's own, of many kinds: the bytes are no archive
        parts = {}
    if not parts or draw.random() < 0.1:
        return mutate(data, most)
    name = draw.choice([*parts, *(["about.npy"] if "about.npy" in parts else []) * 4])
    part = parts.pop(name)
    match draw.randrange(8):
        case 0:
            pass
        case 1:
            parts[draw.choice([name, *parts])] = part
        case 2:
            parts[name] = mutate(part, len(part) + 64)
        case _:
            parts[name] = _array(part, draw, mutate)
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as archive:
        for each, content in parts.items():
            archive.writestr(each, content)
    return found.getvalue() if found.tell() <= most else mutate(data, most)


def _array(part: bytes, draw: random.Random, mutate: Mutate) -> bytes:
    """Another .npy file: other values, or another type or shape of the same bytes."""
    try:
        array: Any = np.load(io.BytesIO(part), allow_pickle=False)
    except Exception:  # numpy's own, of many kinds: the bytes are no array
        return mutate(part, len(part) + 64)
    content = array.tobytes()
    if content[:1] == b"{":
        array = np.frombuffer(json_text(content, 4096, draw.getrandbits(32), mutate), np.uint8)
    elif draw.random() < 0.7 and array.size:
        changed = mutate(content, len(content))
        array = np.frombuffer(changed.ljust(len(content), b"\0"), array.dtype).reshape(array.shape)
    else:
        other = [draw.choice("?bhqefdU"), array.dtype.newbyteorder()]
        with suppress(ValueError, TypeError, IndexError):
            array = draw.choice([array[None], array[:-1], array.T, *(array.astype(dtype) for dtype in other)])
    found = io.BytesIO()
    np.save(found, array, allow_pickle=False)
    return found.getvalue()


def _change(value: Any, draw: random.Random, mutate: Mutate) -> None:
    places = _places(value)
    if not places:
        return
    holder, key = draw.choice(places)
    old = holder[key]
    match draw.randrange(6):
        case 0:
            del holder[key]
        case 1:
            holder[key] = copy.deepcopy(draw.choice(_HOSTILE))
        case 2:
            other, name = draw.choice(places)
            text = json.dumps(other[name]) if name in other or isinstance(other, list) else "null"
            holder[key] = json.loads(text) if len(text) <= _COPIED else None
        case 3 if isinstance(holder, dict):
            new = mutate(str(key).encode("utf-8", "surrogatepass"), 100).decode("utf-8", "replace")
            holder[new] = holder.pop(key)
        case _:
            holder[key] = _nearby(old, draw, mutate)


def _nearby(old: Any, draw: random.Random, mutate: Mutate) -> Any:
    """A value much like the old one."""
    match old:
        case bool():
            return not old
        case int() if abs(old) < 1 << 70:
            return draw.choice([old + 1, old - 1, -old, old * 2, float(old), str(old), draw.getrandbits(40)])
        case float() if abs(old) < 1e300:
            return draw.choice([-old, old * 1e300, round(old), str(old), draw.random()])
        case str():
            return mutate(old.encode("utf-8", "surrogatepass"), len(old) + 20).decode("utf-8", "replace")
        case list():
            return draw.choice([old[:-1], old + old[:1], old[::-1], [old], dict(enumerate(map(str, old)))])
        case dict():
            return draw.choice([[old], list(old.values()), {**old, "more": 1}, {}])
        case _:
            return copy.deepcopy(draw.choice(_HOSTILE))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) inside of a value."""
    found, waiting = list[tuple[Any, Any]](), [value]
    while waiting:
        holder = waiting.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, each in items:
            found.append((holder, key))
            if isinstance(each, dict | list):
                waiting.append(each)
    return found
