"""What a case is, and the sizes that all cases share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers as hf
from torch import Tensor, nn

BATCH, PROMPT, FRAME, LENGTH, CHUNK = 2, 3, 5, 24, 4
"""Rows, tokens of the prompt (fewer than a chunk's), tokens per frame, positions, tokens per prefill call."""
VOCAB, WIDTH, MLP_WIDTH, HEADS, LAYERS = 31, 32, 48, 4, 2


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: of the test.
        family: what the table calls it. what: its structure, as far as it differs from the family's plain form.
        build: returns the model, always with the same weights.
        mlp: the layers' MLPs as a regular expression over module paths; its only group is the layer's number. An MLP
            that is no module of its own is found by its first and last linear, (first, last).
        gate: what decides in the replayed decode: "tas" or "input_delta".
        full: every run of the tests compiles it for eager, cpu and onnxruntime; `make thorough` does so for all.
        kv: type of cached keys and values.
        headless: it takes embeddings. classes: token ids after the vocabulary, one of which begins a sequence.
        warned: the beginning of the compiler's warning; None: there is none.
        refused: a part of the sentence that refuses the model; None where it compiles.
        context: returns what cross-attention reads, and its mask where it has one.
        prompt: tokens of the prompt. frame: tokens per frame. length: positions of the sequence.
    """

    name: str
    family: str
    what: str
    build: Callable[[], nn.Module]
    mlp: str | tuple[str, str] = r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.mlp"
    gate: str = "tas"
    full: bool = False
    kv: Literal["float32", "float16", "bfloat16", "int8"] = "float32"
    headless: bool = False
    classes: int = 0
    warned: str | None = None
    refused: str | None = None
    context: Callable[[], tuple[Tensor, ...]] | None = None
    prompt: int = PROMPT
    frame: int = FRAME
    length: int = LENGTH

    @property
    def model(self) -> str:
        """The class of the model."""
        return getattr(self.build, "kind", self.build).__name__


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter random values, norms and biases too, so that nothing that is left out stays unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            elif "bias" in name:
                parameter.copy_(0.1 * noise)
            else:
                parameter.add_(0.1 * noise)
    return model.eval()


@dataclass(frozen=True)
class Plain:
    """Builds a module of the step protocol.

    Attributes:
        kind: its class. arguments: of the constructor.
    """

    kind: type[nn.Module]
    arguments: tuple[int, ...] = ()

    def __call__(self) -> nn.Module:
        """Return the module, in evaluation mode."""
        return randomize(self.kind(*self.arguments))


@dataclass(frozen=True)
class Transformer:
    """Builds a Transformers model of the sizes that all cases share, with changes.

    Attributes:
        kind: class of the model. config: class of its config.
        arguments: of the config, beside or instead of the shared ones.
        dtype: of the parameters.
    """

    kind: type[nn.Module]
    config: Callable[..., Any]
    arguments: Mapping[str, Any]
    dtype: torch.dtype = torch.float32

    def __call__(self) -> nn.Module:
        """Return the model, in evaluation mode."""
        return randomize(self.kind(self.config(**self.arguments))).to(self.dtype)


def transformer(kind: type[nn.Module], config: Callable[..., Any], **changes: Any) -> Transformer:
    """Return what builds a model; a change of `...` leaves the shared size out."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": MLP_WIDTH, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    arguments = {name: value for name, value in {**sizes, **changes}.items() if value is not ...}
    return Transformer(kind, config, arguments)


def causal(name: str, **changes: Any) -> Transformer:
    """Return what builds `{name}ForCausalLM` of Transformers, as `transformer` does."""
    return transformer(getattr(hf, f"{name}ForCausalLM"), getattr(hf, f"{name}Config"), **changes)
