"""The data of the inspection page, which holds it as JSON: typed nodes of graphs, and lines of tables as dicts."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Change = Literal["kept", "added", "removed", "replaced"]
Json = dict[str, Any]


def given(**fields: Any) -> Json:
    """Return the fields that say something: the page takes what is missing for empty."""
    return {name: value for name, value in fields.items() if value is not None and value != ""}


def facts_of(lines: Mapping[str, object], group: str = "") -> list[Json]:
    """Return the lines of a table of two columns: label -> value. group: heading that they belong to."""
    return [given(label=label, value=str(value), group=group) for label, value in lines.items()]


class PagePart(BaseModel):
    """The base of the parts of a graph."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PageNode(PagePart):
    """One node of a graph.

    Args:
        id: name of the node; inside of a branch, `branch/name`.
        op: operator, or the value that a placeholder stands for.
        type: dtype and shape. args: arguments that are not nodes.
        inputs: ids of the nodes that the node reads. weights: ids of the parameters that the node reads.
        branches: names of the branches of a `cond`.
        source: file and line in the model. made_by: the pass that made the node; "": the model has it.
        reason: key of the page's reasons.
        change: difference from the other graph. twin: id of the other graph's node that this node equals, replaces or
            is replaced by.
        layer: number of the layer; None outside of the layers. branch: name; "" outside of branches.
    """

    id: str
    kind: Literal["input", "state", "weight", "op", "cond"]
    op: str
    type: str
    args: str = ""
    inputs: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    branches: tuple[str, ...] = ()
    source: str = ""
    module: str = ""
    made_by: str = ""
    reason: str = ""
    role: str = ""
    change: Change = "kept"
    twin: str = ""
    layer: int | None = None
    branch: str = ""


class PageGroup(PagePart):
    """Nodes that unfold together, in the order of the graph.

    Args:
        layer: number of the layer; None in front of the layers and behind them. key: text that layers of equal
            structure share, in both graphs.
    """

    title: str
    layer: int | None
    key: str
    nodes: tuple[str, ...]


class PageGraph(PagePart):
    """A decode step, or a chunk of a prompt. outputs: name of each result -> id of its node."""

    nodes: tuple[PageNode, ...]
    groups: tuple[PageGroup, ...]
    outputs: dict[str, str]
