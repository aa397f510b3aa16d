"""The decoder's layers: where attention and MLP are in the rewritten graph, and what replay was inserted."""

from __future__ import annotations

from fastcar_compile.artifact.sections.base import Float, Part, Section


class AttentionPart(Part):
    """Attention of one layer. `node`, `query` and the caches are node names; `scale` is the softmax scale.

    Args:
        cache_rows: positions that a cache has room for.
        window, sinks: a query sees the first `sinks` positions and the last `window` ones, itself included; `window`
            None: all of them.
        softcap: a logit becomes softcap * tanh(logit / softcap); None: it stays.
    """

    node: str
    query: str
    key_cache: str
    value_cache: str
    scale: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    cache_rows: int
    window: int | None = None
    sinks: int = 0
    softcap: float | None = None


class MlpPart(Part):
    """MLP of one layer, from node `input` to node `output`.

    Args:
        linears: nodes, in the order gate, up, down, or up, down. weights: their parameters. biases: the same, None
            where there is none.
        gated: the MLP is down(act(gate(x)) * up(x)), not down(act(up(x))).
        hidden: H, inputs and outputs. intermediate: outputs of up.
    """

    input: str
    output: str
    linears: tuple[str, ...]
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]
    activation: str
    gated: bool
    hidden: int
    intermediate: int


class ReplayPart(Part):
    """The gate of one layer.

    Args:
        heads: (query head, weight) pairs of a gate that averages over chosen heads; None: over all.
        gate_units: hidden units of a gate that is a network; None: it is none.
    """

    gate: str
    threshold: Float
    heads: tuple[tuple[int, float], ...] | None = None
    gate_units: int | None = None


class LayerPart(Part):
    """One decoder layer. The graph order is entry, attention, residual, norm, MLP, region_output, exit.

    `exit` adds `residual` and `region_output`; `residual` adds entry and attention.

    Args:
        module_path, source: where the layer is in the model and in its source.
        region_output: what the closing add `exit` adds to `residual`.
        parallel: the MLP reads the entry, as attention does, and not `residual`.
        replay: None: the layer never replays.
    """

    layer: int
    module_path: str
    source: str
    entry: str
    residual: str
    region_output: str
    exit: str
    attention: AttentionPart
    mlp: MlpPart
    replay: ReplayPart | None
    parallel: bool = False


class LayersSection(Section):
    """Every layer, in order."""

    layers: tuple[LayerPart, ...]

    @property
    def thresholds(self) -> list[float | None]:
        """The compiled threshold of every layer; None: the layer never replays."""
        return [None if layer.replay is None else layer.replay.threshold for layer in self.layers]

    @property
    def gates(self) -> list[str | None]:
        """The gate of every layer; None: the layer never replays."""
        return [None if layer.replay is None else layer.replay.gate for layer in self.layers]
