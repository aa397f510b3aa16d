"""Ring caches in a graph: which caches are rings, and how large they are. `ops/window.py` defines the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from fastcar_compile.ir.query import argument_names, is_op, shape_of

fastcar = torch.ops.fastcar
WINDOWED = (fastcar.window_attention, fastcar.exact_window_attention)
ATTENTIONS = (fastcar.attention, fastcar.exact_attention, *WINDOWED)
"""Attention of a decoder layer to its own cache; of these, to a window."""


@dataclass(frozen=True)
class RingRows:
    """The rows of a ring cache: `sinks` first positions, and the last `rows` others."""

    sinks: int
    rows: int


@dataclass(frozen=True)
class Window:
    """What one query of an attention sees: the first `sinks` positions and the last `window` ones."""

    sinks: int
    window: int


def ring_of(written: fx.Node) -> RingRows | None:
    """Return the rows of a written cache; None: it is no ring."""
    if not is_op(written, fastcar.ring_write):
        return None
    sinks = cast("int", written.args[3])
    return RingRows(sinks, shape_of(written)[2] - sinks)


def window_of(attention: fx.Node) -> Window | None:
    """Return what an attention sees; None: all earlier positions."""
    if not is_op(attention, *WINDOWED):
        return None
    return Window(cast("int", attention.args[5]), cast("int", attention.args[6]))


def softcap_of(attention: fx.Node) -> float | None:
    """Return the soft-cap of an attention's logits; None: there is none."""
    names = argument_names(attention)
    if "softcap" not in names:
        return None
    # A call leaves the soft-cap out where there is none.
    index = names.index("softcap")
    return cast("float | None", attention.args[index]) if len(attention.args) > index else None
