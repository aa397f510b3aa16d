"""Which rows compute, and what a mapping of rows to cores makes of it: passes over the weights of a tile.

A core is one slot of the MAC array. All cores take part in a pass, so the passes of a layer are the rows of the core
that has most. DRS gives the i-th computing row to core i mod C. The static mapping, which exists for comparison only,
gives row b to core b mod C whatever computes.
"""

from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.errors import InputError
from fastcar_compile.support.values import read_arrays

Decisions = NDArray[np.bool_]


class Mapping(StrEnum):
    """How computing rows are given to cores."""

    DRS = "drs"
    STATIC = "static"


class Draw(StrEnum):
    """How decisions of a replay ratio are drawn."""

    INDEPENDENT = "independent"
    CORRELATED = "correlated"
    PAIRS = "pairs"


def draw_decisions(
    shape: tuple[int, int, int], replay: float, kind: Draw = Draw.INDEPENDENT, seed: int = 0
) -> Decisions:
    """Return decisions bool [forwards, layers, rows] of a replay ratio, exact per layer and row up to one forward.

    Args:
        kind: rows that decide each for itself; all alike (correlated); or guidance pairs, rows b and b + B / 2 alike.

    Raises:
        InputError: pairs of an odd number of rows.
    """
    forwards, layers, rows = shape
    if kind is Draw.PAIRS:
        _require_pairs(rows)
    own = {Draw.INDEPENDENT: rows, Draw.PAIRS: rows // 2, Draw.CORRELATED: 1}[kind]
    ranks = np.random.default_rng(seed).random((forwards, layers, own)).argsort(0).argsort(0)
    return np.tile(ranks < round(replay * forwards), rows // own)


def coupled(decisions: Decisions) -> Decisions:
    """Return decisions bool [..., B] in which rows b and b + B / 2 replay only together, as with `couple_cfg`.

    Raises:
        InputError: the number of rows is odd.
    """
    _require_pairs(decisions.shape[-1])
    first, second = np.split(decisions, 2, axis=-1)
    return np.concatenate([first & second] * 2, axis=-1)


def _require_pairs(rows: int) -> None:
    if rows % 2:
        raise InputError(f"{rows} row(s) are no guidance pairs", hint="pairs are rows b and b + B / 2 of an even batch")


def core_rows(computing: NDArray[np.bool_], cores: int, mapping: Mapping) -> NDArray[np.int64]:
    """Return how many rows every core computes, int [..., cores], of computing rows bool [..., rows]."""
    if cores < 1:
        raise InputError(f"there are no {cores} cores", hint="give at least one")
    if mapping is Mapping.DRS:
        active = computing.sum(-1, keepdims=True)
        return (active - np.arange(cores) + cores - 1) // cores
    padded = np.zeros((*computing.shape[:-1], -(-computing.shape[-1] // cores) * cores), bool)
    padded[..., : computing.shape[-1]] = computing
    return padded.reshape(*computing.shape[:-1], -1, cores).sum(-2)


def passes_of(decisions: Decisions, cores: int, mapping: Mapping) -> NDArray[np.int64]:
    """Return the passes of every layer, int [forwards, layers]; 0: every row replays."""
    return core_rows(~decisions, cores, mapping).max(-1)


_HINT = "write it with `fastcar run --trace`, or np.save(path, session.stats.decisions)"


def load_trace(path: Path) -> NDArray[np.bool_]:
    """Return decisions bool [forwards, layers, rows], True where a row replayed.

    Raises:
        InputError: the file is missing, cannot be read, or holds something else.
    """
    arrays = read_arrays(path, "trace", _HINT)
    decisions = arrays.get("", np.empty(0))
    if decisions.dtype != np.bool_ or decisions.ndim != 3:
        kind = f"{decisions.dtype} {list(decisions.shape)}" if "" in arrays else "an archive"
        what = f"the trace holds {kind}, expected bool [forwards, layers, rows]"
        raise InputError(what, where=str(path), hint=_HINT)
    return decisions
