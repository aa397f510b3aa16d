"""What a comparison found, as typed data."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, computed_field

NodeKind = Literal["inserted", "removed", "changed", "rewired"]
TensorKind = Literal["only in a", "only in b", "shape", "values"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FieldChange(_Model):
    """One value that differs; None where a side does not have it.

    Args:
        path: dotted, with indices in brackets; "[*]" where every element that differs does so alike.
        count: elements that "[*]" stands for.
    """

    path: str
    a: Any
    b: Any
    count: int = 1


class NodeChange(_Model):
    """A node that has no counterpart, or differs from it; equal changes of several layers are one.

    Args:
        kind: inserted (only in b), removed (only in a), changed (same operator, other result or constant), rewired
            (same operator, other operands).
        target: operator, or what else the node is.
        detail: result type of a node without counterpart, else what differs.
        module: path of the module in the model, with "*" for the layer's number.
        source, made_by: line of the model, and the pass that made the node; empty where the graph does not say.
        layers: numbers; empty: outside of the layers.
        names: of the nodes, in b where it has them.
    """

    kind: NodeKind
    target: str
    detail: str
    module: str
    source: str
    made_by: str
    layers: tuple[int, ...]
    names: tuple[str, ...]


class GraphComparison(_Model):
    """One graph of both sides. nodes: of a and of b, those of `cond` branches included. matched: equal pairs."""

    name: str
    nodes: tuple[int, int]
    matched: int
    changes: tuple[NodeChange, ...]


class TensorChange(_Model):
    """A tensor that differs.

    Args:
        name: with "*" for numbers where `count` tensors differ alike, as those of all layers may.
        detail: types and shapes, where those differ.
        elements: that differ. max_abs: largest difference. relative: root mean square of the difference over that of a.
    """

    name: str
    kind: TensorKind
    detail: str = ""
    elements: int = 0
    max_abs: float = 0.0
    relative: float = 0.0
    count: int = 1


class Comparison(_Model):
    """Everything that differs between a and b; empty parts are equal.

    Args:
        options: that were asked for. sections: what the compiler says. versions: of the packages that wrote it.
        graphs: those of which something differs. weights: of the rewritten graph.
        figures: sizes, and what the estimate predicts for the target. files: names of files of other bytes.
    """

    a: str
    b: str
    options: tuple[FieldChange, ...] = ()
    sections: tuple[FieldChange, ...] = ()
    versions: tuple[FieldChange, ...] = ()
    graphs: tuple[GraphComparison, ...] = ()
    weights: tuple[TensorChange, ...] = ()
    figures: tuple[FieldChange, ...] = ()
    files: tuple[str, ...] = ()

    @computed_field
    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        parts = (self.options, self.sections, self.versions, self.graphs, self.weights, self.figures, self.files)
        return not any(parts)
