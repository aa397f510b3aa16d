"""Journals: what an interrupted calibration or evaluation has measured."""

from __future__ import annotations

import json
from copy import copy
from pathlib import Path
from typing import Any

from fastcar_compile.errors import InputError
from fastcar_compile.support.files import replace_file
from fastcar_compile.support.values import read_json


class Journal:
    """All measurements, in a JSON file, so that an interrupted calibration or evaluation continues.

    Args:
        path: the file; None keeps nothing. key: hash of everything that the measurements depend on. A file with another
            key is replaced.
        work: what measures, for error texts. field: the measurements' name in the file.

    Raises:
        InputError: the file is no such journal.
    """

    def __init__(
        self,
        path: Path | None,
        key: str,
        work: str = "calibration",
        field: str = "measurements",
    ) -> None:
        self._path, self._key, self._field, self._prefix = path, key, field, ""
        self.entries: dict[str, Any] = {}
        if path is not None and path.exists():
            hint = f"give the journal of an interrupted {work}, or a new place"
            data = read_json(path, "journal", InputError, constants=True, hint=hint)
            if not isinstance(data, dict) or not isinstance(data.get(field), dict):
                raise InputError(f"the file is no journal of an interrupted {work}", where=str(path), hint=hint)
            if data.get("key") == key:
                self.entries = data[field]

    def part(self, name: str) -> Journal:
        """Return a journal whose measurements are kept in this one under names of their own."""
        inner = copy(self)  # entries and file are the same
        inner._prefix = f"{self._prefix}{name} "
        return inner

    def find(self, name: str) -> Any:
        """Return one measurement; None: it is not there."""
        return self.entries.get(self._prefix + name)

    def add(self, name: str, entry: Any) -> None:
        """Keep one measurement. The file is replaced as a whole."""
        self.entries[self._prefix + name] = entry
        if self._path is not None:
            text = json.dumps({"key": self._key, self._field: self.entries}, sort_keys=True, indent=0)
            # A kill while writing leaves the old journal: the new one takes its name when it is whole.
            replace_file(self._path, f"{text}\n".encode())
