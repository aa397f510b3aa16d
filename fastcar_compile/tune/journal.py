"""Journals: what an interrupted calibration or evaluation has measured, and what an entry can be."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
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
        work: what measures, for error texts. field: the measurements' name in the file. right: returns whether an entry
            of the file can be a measurement.

    Raises:
        InputError: the file is no such journal, or an entry is damaged.
    """

    def __init__(
        self,
        path: Path | None,
        key: str,
        work: str = "calibration",
        field: str = "measurements",
        right: Callable[[Any], bool] = lambda _: True,
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
            for name in (name for name, entry in self.entries.items() if not right(entry)):
                line = path.read_bytes().partition(json.dumps(name).encode())[0].count(b"\n") + 1
                hint = "take this entry out of the file, or give a new place: it is measured again"
                what = f"an entry of the journal is damaged: {name:.80}"
                raise InputError(what, where=f"{path}, line {line}", hint=hint)

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


def is_measurement(entry: Any, layers: int) -> bool:
    """Return whether an entry of a journal can be an NLL, the ratio of each layer, and the share of each video."""
    if not isinstance(entry, list) or len(entry) < layers + 2 or any(type(v) not in (int, float) for v in entry):
        return False
    largest = math.inf if isinstance(entry[0], float) else sys.float_info.max  # whole numbers have no end
    return 0 <= entry[0] <= largest and all(0 <= value <= 1 for value in entry[1:])


FIGURES = ("replay_ratio", "mlp_weights_spared", "nll", "nll_dense", "token_agreement")


def is_row(entry: Any) -> bool:
    """Return whether an entry of a journal can be the row of an evaluation."""
    figures = [entry.get(name) for name in FIGURES] if isinstance(entry, dict) else [None]
    shares = [value for value in (figures[0], figures[-1]) if isinstance(value, float)]
    return all(value == "inf" or (isinstance(value, float) and value >= 0) for value in figures) and (
        figures[0] != "inf" and all(share <= 1 for share in shares)
    )
