"""Manifests of a small decoder that was never compiled."""

from typing import Any

from fastcar_compile.artifact.manifest import Sections
from fastcar_compile.artifact.sections import DecoderSection, HostSection, LayersSection, PipelineSection, State
from fastcar_compile.artifact.thresholds import Thresholds
from fastcar_compile.config import CompileConfig
from fastcar_compile.config.targets import load_target
from fastcar_compile.ir.types import ATTENTION_ROLES, AttentionSite, DecoderConfig, LayerSite, MlpSite, ReplayFacts


def decoder_config(**changes: Any) -> DecoderConfig:
    """Two rows, three layers, frames of four tokens."""
    sizes: dict[str, Any] = {
        "batch_size": 2, "max_seq_len": 32, "tokens_per_frame": 4, "num_layers": 3, "hidden_size": 128,
    }  # fmt: skip
    return DecoderConfig(**sizes | {"vocab_size": 17, "takes_embeddings": False, "prefill_chunk": 4} | changes)


def layer_part(layer: int, replay: ReplayFacts | None = None, **sizes: Any) -> LayerSite:
    """One layer whose node names carry its number."""
    heads = {name: sizes.pop(name, value) for name, value in (("num_heads", 4), ("num_kv_heads", 4), ("head_dim", 32))}
    mlp = {"activation": "silu", "gated": True, "hidden": 128, "intermediate": 352} | sizes
    return LayerSite(
        entry=f"entry_{layer}",
        residual=f"residual_{layer}",
        region_output=f"region_output_{layer}",
        exit=f"exit_{layer}",
        layer=layer,
        module_path=f"model.layers.{layer}.mlp",
        source="model.py:12",
        attention=AttentionSite(
            node="sdpa",
            query="q",
            key_cache=f"key_cache_{layer}",
            value_cache=f"value_cache_{layer}",
            scale=0.2,
            cache_rows=32,
            **heads,
        ),
        mlp=MlpSite(input="x", output="y", linears=("a", "b", "c"), weights=("a", "b", "c"), biases=(None,) * 3, **mlp),
        replay=replay,
    )


def stored_thresholds(*values: float | None) -> Thresholds:
    """Thresholds of gate tas for so many layers, half of whose rows replay."""
    layers = (0.5,) * len(values)
    return Thresholds(
        gate="tas", values=values, replay=0.5, per_layer=layers, nll=1.0, nll_dense=1.0, goal="none", inputs="ab"
    )


def decoder_section(config: DecoderConfig, **changes: Any) -> DecoderSection:
    """A decoder without replay: keys and values of every layer, four heads of 32."""
    shape = (config.batch_size, 4, config.max_seq_len, 32)
    state = tuple(
        State(name=f"{role}_{layer}", shape=shape, dtype="float32", role=role, layer=layer)
        for layer in range(config.num_layers)
        for role in ATTENTION_ROLES
    )
    names = tuple(each.name for each in state)
    fields: dict[str, Any] = {
        "config": config, "state": state, "inputs": (config.input_name, "position", *names),
        "outputs": ("logits", *names), "prefill_outputs": ("logits", *names), "weight_bytes": 2_000_000,
    }  # fmt: skip
    return DecoderSection(**fields | changes)


def sections(**changes: Any) -> Sections:
    """Everything but files and producers; `changes` are sections."""
    config = decoder_config()
    fields = {
        "options": CompileConfig(target="zcu102", tokens_per_frame=4, max_seq_len=32, batch_size=2),
        "target": load_target("zcu102"),
        "decoder": decoder_section(config),
        "layers": LayersSection(layers=tuple(layer_part(layer) for layer in range(3))),
        "pipeline": PipelineSection(passes="", log=()),
        "host": HostSection(variants=(), board=None),
    }
    return Sections(**fields | changes)
