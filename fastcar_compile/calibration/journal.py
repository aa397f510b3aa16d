"""The measurements of a calibration, in a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fastcar_compile.errors import InputError
from fastcar_compile.strict_json import read_json

_HINT = "give the journal of an interrupted calibration, or a new file"


class Journal:
    """All measurements, in a JSON file, so that an interrupted calibration continues.

    Args:
        path: the file; None keeps nothing. key: hash of everything that the measurements depend on. A file with another
            key is replaced.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self._path, self._key, self._prefix = path, key, ""
        self.entries: dict[str, list[float]] = {}
        if path is not None and path.exists():
            data = read_json(path, "journal", InputError, constants=True, hint=_HINT)
            if not isinstance(data, dict) or not isinstance(data.get("measurements"), dict):
                raise InputError("the file is no journal of a calibration", where=str(path), hint=_HINT)
            if data.get("key") == key:
                self.entries = data["measurements"]

    def part(self, name: str) -> Journal:
        """Return a journal whose measurements are kept in this one under names of their own."""
        inner = Journal(None, self._key)
        inner._path, inner._prefix, inner.entries = self._path, f"{self._prefix}{name} ", self.entries
        return inner

    def find(self, name: str) -> list[float] | None:
        """Return one measurement; None: it is not there."""
        return self.entries.get(self._prefix + name)

    def add(self, name: str, entry: list[float]) -> None:
        """Keep one measurement. The file is replaced as a whole."""
        self.entries[self._prefix + name] = entry
        if self._path is not None:
            text = json.dumps({"key": self._key, "measurements": self.entries}, sort_keys=True, indent=0)
            # A kill while writing leaves the old journal: the new one takes its name when it is whole.
            scratch = self._path.with_name(self._path.name + ".part")
            scratch.write_text(text + "\n", "utf-8")
            os.replace(scratch, self._path)
