"""The data of the inspection page. The page holds it as JSON; every value is derived from the artifact's own files."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Change = Literal["kept", "added", "removed", "replaced"]


class PagePart(BaseModel):
    """The base of every part of the page."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Fact(PagePart):
    """One line of a table of two columns. group: heading that the line belongs to."""

    label: str
    value: str
    group: str = ""


def facts_of(lines: Mapping[str, object], group: str = "") -> tuple[Fact, ...]:
    """Return the lines of a table: label -> value."""
    return tuple(Fact(label=label, value=str(value), group=group) for label, value in lines.items())


class PageNode(PagePart):
    """One node of a graph.

    Args:
        id: name of the node; inside of a branch, `branch/name`.
        op: operator, or the value that a placeholder stands for.
        type: dtype and shape. args: arguments that are not nodes.
        inputs: ids of the nodes that the node reads. weights: ids of the parameters that the node reads.
        branches: names of the branches of a `cond`.
        source: file and line in the model. made_by: the pass that made the node; "": the model has it.
        reason: key of `PageData.reasons`.
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


class PassLine(PagePart):
    """The work of one pass. made: nodes of the rewritten graph that the pass made."""

    name: str
    options: str
    modified: bool
    made: int
    reason: str


class LayerLine(PagePart):
    """Attention, MLP and replay of one layer. replays: the layer may replay. bytes: size of the layer's state, by role.

    Args:
        threshold: compiled threshold. calibrated: threshold stored in the artifact; "": no threshold is stored.
            expected: share that replayed in calibration. measured: share that replayed in the trace, of the forwards
            t >= F. draft: what a replay computes and reads; "": it takes the cached output.
    """

    layer: int
    module: str
    source: str
    attention: str
    mlp: str
    gate: str
    replays: bool
    threshold: str
    draft: str = ""
    calibrated: str = ""
    expected: float | None = None
    measured: float | None = None
    bytes: dict[str, int]


class HeatMap(PagePart):
    """Share of the rows that replayed in recorded decisions, 0 to 1.

    Args:
        frames: [layers][frames], mean over the tokens of a frame. tokens: [layers][stride], mean over the frames
            after the first. total: mean over all layers, forwards t >= F.
    """

    forwards: int
    stride: int
    rows: int
    frames: tuple[tuple[float, ...], ...]
    tokens: tuple[tuple[float, ...], ...]
    total: float | None


class ReplayPage(PagePart):
    """Gate, thresholds and decisions. facts: gate, limits, calibration."""

    facts: tuple[Fact, ...]
    layers: tuple[LayerLine, ...]
    heat: HeatMap | None


class StepLine(PagePart):
    """The time line of one decode step.

    Args:
        title: `dense`, or the replay in words. note: origin of the decisions. replay: share of all decisions.
        events: events in Chrome's trace format, as `fastcar estimate --time-line` writes them.
    """

    title: str
    note: str
    replay: float
    seconds: float
    events: tuple[dict[str, Any], ...]


class OffloadLine(PagePart):
    """A call of the accelerator, or a linear that stays on the host, and why.

    Args:
        shape: inputs and outputs. stream_bytes: bytes of weights of one call. cycles: estimated clocks of one call.
    """

    name: str
    modules: tuple[str, ...]
    shape: str = ""
    stream_bytes: int = 0
    cycles: int = 0
    reason: str = ""


class SpeedPage(PagePart):
    """The estimate of a decode step. missing: the reason why the page has no estimate; else "".

    Args:
        shares: unit -> share of the step. resources: name -> used and limit. offload: part of the accelerator.
        clock_hz: clock of the fabric. steps: decode step without replay; then, where a row replays, with replay.
        unknown: the share that replays is not known.
    """

    missing: str = ""
    facts: tuple[Fact, ...] = ()
    seconds: float = 0.0
    shares: dict[str, float] = {}
    resources: dict[str, tuple[float, float]] = {}
    offload: tuple[OffloadLine, ...] = ()
    clock_hz: float = 0.0
    steps: tuple[StepLine, ...] = ()
    unknown: bool = False


class MemoryPiece(PagePart):
    """Bytes of one kind in a memory."""

    name: str
    bytes: int


class MemoryBar(PagePart):
    """A memory, a bank of a memory, or the whole memory of a CPU. capacity: bytes; None: the capacity is not known."""

    name: str
    note: str
    capacity: int | None
    pieces: tuple[MemoryPiece, ...]


class TensorLine(PagePart):
    """A parameter or a state tensor. layer: number of the layer; None outside of the layers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    role: str
    layer: int | None = None


class BufferLine(PagePart):
    """A buffer that the host gives to a kernel. port: port or banks of the memory; "": the linker chooses."""

    name: str
    kernel: str
    direction: Literal["in", "out"]
    port: str
    bytes: int


class MemoryPage(PagePart):
    """Memories, banks, buffers of the kernels, state and parameters."""

    bars: tuple[MemoryBar, ...]
    buffers: tuple[BufferLine, ...]
    state: tuple[TensorLine, ...]
    weights: tuple[TensorLine, ...]


class FileLine(PagePart):
    """A file of the artifact."""

    name: str
    bytes: int
    sha256: str


class PageData(PagePart):
    """Everything on the page.

    Args:
        name: name of the artifact's folder. before, after: the decode step. prefill_before, prefill_after: a chunk of
            the prompt; None: the prompt is read token by token. reasons: text of every key that nodes and passes have.
    """

    name: str
    facts: tuple[Fact, ...]
    passes: tuple[PassLine, ...]
    before: PageGraph
    after: PageGraph
    prefill_before: PageGraph | None = None
    prefill_after: PageGraph | None = None
    reasons: dict[str, str]
    replay: ReplayPage
    speed: SpeedPage
    memory: MemoryPage
    files: tuple[FileLine, ...]
