"""DecoderProgram: the one representation that passes rewrite and every backend is lowered from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

from fastcar_compile.ir.weights import LazyWeights, Parameters


class StateRole(StrEnum):
    """What a state tensor is for."""

    KEY_CACHE = "key_cache"
    VALUE_CACHE = "value_cache"
    MLP_CACHE = "mlp_cache"
    GATE_CACHE = "gate_cache"
    CHAIN_COUNT = "chain_count"


@dataclass(frozen=True)
class StateSpec:
    """One named state tensor: an input and an output of the graph under the same name; starts at zero."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: StateRole
    layer: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def zeros(self) -> Tensor:
        """The state at reset."""
        return torch.zeros(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class Ring:
    """Sparse attention over ring caches [B, Hkv, sinks + rows, D] (docs/explanation/sparse_attention.md), in tokens.

    A query at position p sees keys 0 .. sinks - 1 and p - window + 1 .. p. Position p >= sinks is at row
    sinks + (p - sinks) mod rows. `positions`: "absolute", or "cache", where the sinks are met as if the positions
    between them and the window did not exist.
    """

    sinks: int
    window: int
    rows: int
    positions: str = "absolute"

    @property
    def capacity(self) -> int:
        """Rows of a key or value cache."""
        return self.sinks + self.rows

    @property
    def attended(self) -> int:
        """Keys that one query sees at most."""
        return self.sinks + self.window


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options that fix the graph.

    batch_size rows B, max_seq_len S and tokens_per_frame F in tokens, hidden_size H, vocab_size V (None: headless),
    prefill_chunk tokens of one prefill call (0: no prefill graph), takes_embeddings: input is float32 [B, T, H].
    ring: sparse attention; None: attention to all positions, whose caches hold S rows.
    """

    batch_size: int
    max_seq_len: int
    tokens_per_frame: int
    num_layers: int
    hidden_size: int
    vocab_size: int | None
    takes_embeddings: bool
    prefill_chunk: int
    ring: Ring | None = None

    @property
    def input_name(self) -> str:
        """Name of the token or embedding placeholder."""
        return "inputs_embeds" if self.takes_embeddings else "tokens"


@dataclass(frozen=True)
class LayerSite:
    """Where one decoder layer's attention and MLP are in the graph. Fields hold node names.

    `gate`, its `heads` ((query head, weight) pairs) and its hidden units, where it is a network, are those that
    insert-replay put in.

    entry -> attention -> residual -> norm -> mlp_input -> MLP -> mlp_output -> region_output -> exit, where
    region_output is what the closing residual add `exit` adds to `residual`. `linears`, `weights` and `biases` (None
    where there is no bias) are in the order gate, up, down or up, down.
    """

    layer: int
    module_path: str
    source: str
    attention: str
    query: str
    key_cache: str
    value_cache: str
    scale: float
    entry: str
    residual: str
    mlp_input: str
    mlp_output: str
    region_output: str
    exit: str
    linears: tuple[str, ...]
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]
    activation: str
    gated: bool
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    replay: bool = False
    threshold: float | None = None
    gate: str | None = None
    heads: tuple[tuple[int, float], ...] | None = None
    gate_units: int | None = None


@dataclass
class DecoderProgram:
    """A decode step, its prefill chunk and what is known about both.

    Attributes:
        graph_module: torch.fx decode step; placeholders and outputs as in docs/reference/architecture.md.
        prefill: torch.fx prefill chunk over the same key and value caches, or None.
        state: every state tensor of the decode step.
        outputs: names of the decode step's output tuple, in order.
        prefill_outputs: the same of the prefill chunk.
        sites: one per decoder layer, in order; filled by the find-sites pass.
        config: sizes and options.
        log: what every pass did, for `explain`.
        lazy: where the values of parameters come from that the graphs hold on the meta device; None: all are there.
    """

    graph_module: fx.GraphModule
    prefill: fx.GraphModule | None
    config: DecoderConfig
    state: list[StateSpec] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    prefill_outputs: list[str] = field(default_factory=list)
    sites: list[LayerSite] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    lazy: LazyWeights | None = None

    @property
    def inputs(self) -> list[str]:
        """Placeholder names of the decode step, in order, state included."""
        return placeholder_names(self.graph_module)

    @property
    def params(self) -> Parameters:
        """Every parameter and constant that the two graphs read, by attribute path."""
        found: dict[str, Tensor] = {}
        for module in self.graphs():
            found |= tensor_attributes(module)
        return Parameters(found, self.lazy)

    def graphs(self) -> Iterator[fx.GraphModule]:
        """The decode step and, if there is one, the prefill chunk."""
        yield self.graph_module
        if self.prefill is not None:
            yield self.prefill

    def state_names(self, *roles: StateRole) -> list[str]:
        """Names of the states with one of these roles, all without an argument."""
        return [s.name for s in self.state if not roles or s.role in roles]

    def example_inputs(self, graph: fx.GraphModule | None = None) -> list[Tensor]:
        """Zero tensors for every placeholder of a graph, in order."""
        module = graph or self.graph_module
        return [_zeros_like(n) for n in module.graph.nodes if n.op == "placeholder"]


def graph_module(root: nn.Module | Mapping[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """A module of the graph. Its Python code is written when it is first called, which a build mostly never does: the
    branches of all layers take a good part of the passes' time otherwise."""
    return _GraphModule(root, graph)  # type: ignore[arg-type]


class _GraphModule(_LazyGraphModule):
    """The first call is one call for hooks, too; torch's own calls the module again."""

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.real_recompile()
        return type(self).forward(self, *args, **kwargs)

    forward = _lazy_forward


def _zeros_like(node: fx.Node) -> Tensor:
    val = node.meta["val"]
    return torch.zeros(tuple(val.shape), dtype=val.dtype)


def placeholder_names(module: fx.GraphModule) -> list[str]:
    """Placeholder names in order."""
    return [str(n.target) for n in module.graph.nodes if n.op == "placeholder"]


def tensor_attributes(module: fx.GraphModule) -> dict[str, Tensor]:
    """Tensors read by `get_attr` nodes, by attribute path."""
    found: dict[str, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = get_attribute(module, str(node.target))
            if isinstance(value, Tensor):
                found[str(node.target)] = value
    return found


def get_attribute(module: torch.nn.Module, path: str) -> object:
    """The attribute at a dotted path."""
    value: object = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def source_of(node: fx.Node) -> str:
    """`file:line` of the innermost frame outside torch in the node's stack trace, without machine-specific folders."""
    if node.meta.get("source"):
        return node.meta["source"]
    for line in reversed((node.meta.get("stack_trace") or "").splitlines()):
        text = line.strip()
        if text.startswith('File "'):
            path, _, rest = text[6:].partition('", line ')
            if "/torch/" in path:
                continue
            return f"{_importable(path)}:{rest.split(',')[0]}"
    return ""


def _importable(path: str) -> str:
    """The path as `import` sees it, below the longest entry of sys.path; else its last two parts."""
    roots = [entry for entry in sys.path if entry and path.startswith(entry.rstrip("/") + "/")]
    if roots:
        return path[len(max(roots, key=len).rstrip("/")) + 1 :]
    return "/".join(PurePath(path).parts[-2:])


def module_path_of(node: fx.Node) -> str:
    """Dotted path of the innermost nn.Module that made this node."""
    if node.meta.get("module"):
        return node.meta["module"]
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack.values())[-1][0] if stack else ""


def where(node: fx.Node) -> str:
    """Module path, source line and node name, for error texts."""
    parts = [p for p in (module_path_of(node), source_of(node), f"node {node.name}") if p]
    return ", ".join(parts)
