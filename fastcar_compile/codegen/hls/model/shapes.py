"""The sizes of a decoder that the hardware model needs: by name, or from an artifact's manifest."""

import tomllib
from collections.abc import Sequence
from importlib.resources import files
from math import ceil
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fastcar_compile.codegen.hls.design.spec import LinearSpec
from fastcar_compile.errors import InputError, UserError, names_text
from fastcar_compile.gates.draft import DraftSize
from fastcar_compile.ir.types import DecoderConfig, LayerSite
from fastcar_compile.support import limits


class DecoderShape(BaseModel):
    """Sizes of one decoder.

    Args:
        heads: query heads; `kv_heads` key and value heads.
        vocab: outputs of the head; 0 for a headless decoder.
        tokens_per_frame: replay stride F in tokens.
        frames: frames of one video; with F they give the share of forwards that may replay.
        depth: name of the shape of its depth head, which makes a code of a position in each of its `frames` steps.
        source: where the figures come from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    layers: int = Field(ge=1, le=limits.SIZE)
    hidden: int = Field(ge=1, le=limits.SIZE)
    intermediate: int = Field(ge=1, le=limits.SIZE)
    heads: int = Field(ge=1, le=limits.SIZE)
    kv_heads: int = Field(ge=1, le=limits.SIZE)
    head_dim: int = Field(ge=1, le=limits.SIZE)
    vocab: int = Field(ge=0, le=limits.SIZE)
    gated: bool = True
    activation: str = "silu"
    tokens_per_frame: int = Field(default=256, ge=1, le=limits.SIZE)
    frames: int = Field(default=8, ge=1, le=limits.SIZE)
    depth: str | None = None
    source: str

    @property
    def attention_linears(self) -> tuple[LinearSpec, LinearSpec]:
        """q, k and v as one product (they share their input), then o."""
        width = self.heads * self.head_dim
        qkv = LinearSpec("qkv", self.hidden, width + 2 * self.kv_heads * self.head_dim)
        return qkv, LinearSpec("o", width, self.hidden)

    @property
    def mlp_linears(self) -> tuple[LinearSpec, LinearSpec]:
        """Gate and up as one product, then down."""
        first = LinearSpec("gate_up", self.hidden, self.intermediate * (2 if self.gated else 1))
        return first, LinearSpec("down", self.intermediate, self.hidden)

    def drafts(self, share: float) -> tuple[DraftSize, ...]:
        """Return drafts of all layers with about this share of an MLP's weights, sized as `fastcar fit-draft` does; () for 0.

        Raises:
            InputError: the least draft is larger than the MLP.
        """
        if not share:
            return ()
        # Neurons are the same part of the MLP's as the rank is of the hidden size.
        parts = (3 if self.gated else 2) * self.intermediate
        size = DraftSize.of_part(share * parts / (parts + 2 * self.hidden), self.intermediate, self.hidden)
        if size.share(self.intermediate, self.gated) >= 1:
            raise InputError(f"a draft with {share} of the MLP's weights is no smaller than the MLP", hint="give less")
        return (size,) * self.layers

    def draft_linears(self, size: DraftSize) -> tuple[LinearSpec, LinearSpec]:
        """Return the two products of a draft: its neurons and linear features, then its output."""
        first = LinearSpec("draft", self.hidden, size.neurons * (2 if self.gated else 1) + size.rank)
        return first, LinearSpec("outer", size.neurons + size.rank, self.hidden)

    @property
    def unit(self) -> str:
        """What one forward of a row decodes: a head that is a module of its own makes the tokens of a position."""
        return "token" if self.vocab else "backbone position"

    @property
    def head(self) -> LinearSpec | None:
        """The product onto the vocabulary."""
        return LinearSpec("head", self.hidden, self.vocab) if self.vocab else None

    def weight_bytes(self, quant: str) -> int:
        """Return the bytes of every linear that one decode step reads; embeddings and norms are left out."""
        block = sum(x.weight_bytes(quant) for x in (*self.attention_linears, *self.mlp_linears))
        return self.layers * block + (self.head.weight_bytes(quant) if self.head else 0)

    def kv_bytes(self, positions: int, rows: int, bits: int, block: int = 0) -> int:
        """Return the bytes of the key and value cache; `block` elements share an exponent of one byte, 0: none do."""
        exponents = ceil(self.head_dim / block) if block else 0
        return self.layers * rows * positions * 2 * self.kv_heads * (self.head_dim * bits // 8 + exponents)

    def mlp_cache_bytes(self, rows: int) -> int:
        """Bytes of the MLP cache: one float32 row per layer, slot of the frame and batch row."""
        return self.layers * self.tokens_per_frame * rows * self.hidden * 4


def _table() -> dict[str, Any]:
    return tomllib.loads((files("fastcar_compile.codegen.hls.model") / "shapes.toml").read_text())


def available_shapes() -> list[str]:
    """Return the names that `load_shape` knows."""
    return sorted(_table())


def load_shape(name: str) -> DecoderShape:
    """Return a decoder shape by name.

    Raises:
        UserError: no such shape.
    """
    table = _table()
    if name not in table:
        raise UserError(f"there is no decoder shape {name!r}", hint=f"choose one of {names_text(sorted(table), name)}")
    return DecoderShape(name=name, **table[name])


def shape_of_sections(config: DecoderConfig, layers: Sequence[LayerSite]) -> DecoderShape:
    """Return the shape of a compiled decoder.

    Raises:
        UserError: the layers differ in size; the model has one size for all.
    """
    _require_equal(layers)
    mlp, attention, stride = layers[0].mlp, layers[0].attention, config.tokens_per_frame
    return DecoderShape(
        name="artifact",
        layers=len(layers),
        hidden=mlp.hidden,
        intermediate=mlp.intermediate,
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        vocab=config.vocab_size or 0,
        gated=mlp.gated,
        activation=mlp.activation,
        tokens_per_frame=stride,
        frames=max(1, config.max_seq_len // stride),
        source="manifest.json",
    )


def _require_equal(layers: Sequence[LayerSite]) -> None:
    def sizes(layer: LayerSite) -> dict[str, Any]:
        heads = {name: getattr(layer.attention, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
        mlp = {name: getattr(layer.mlp, name) for name in ("hidden", "intermediate", "gated", "activation")}
        return mlp | heads

    first = sizes(layers[0])
    for layer in layers[1:]:
        differing = [key for key, value in sizes(layer).items() if value != first[key]]
        if differing:
            what = f"layer {layer.layer} differs from layer 0 in {', '.join(differing)}"
            raise UserError(what, hint="the hardware model covers decoders whose layers have one size")
