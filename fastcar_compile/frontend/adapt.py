"""A decode step from a module whose forward has other names than the step protocol."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fastcar_compile.errors import CompileError
from fastcar_compile.support.values import check_kind

_CARRIED = ("config", "max_seq_len", "tokens_per_frame", "hidden_size", "input_size")
_TOKENS = ("input_ids", "idx", "tokens", "ids", "inputs_embeds", "embeddings", "x")
_POSITIONS = ("input_pos", "position_ids", "positions", "position", "pos", "cache_position")


class Adapted(nn.Module):
    """A module behind the names of the step protocol; `adapt` makes it."""

    def __init__(
        self, model: nn.Module, tokens: str, position: str, rows: bool, output: int | str | None, others: dict[str, Any]
    ) -> None:
        super().__init__()
        self.model, self._names, self._rows, self._output = model, (tokens, position), rows, output
        self._others = others
        for name in _CARRIED:
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))

    def _call(self, tokens: Tensor, position: Tensor) -> Tensor:
        places = position.expand(tokens.shape[0], -1) if self._rows else position
        found = self.model(**dict(zip(self._names, (tokens, places), strict=True)), **self._others)
        if self._output is None:
            return found
        attribute = str(self._output)
        return getattr(found, attribute) if hasattr(found, attribute) else found[self._output]

    def forward(self, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        """Return logits [B, T, V] for token ids int64 [B, T] at positions int64 [T]."""
        return self._call(input_ids, cache_position)


class AdaptedHeadless(Adapted):
    """The same of a decoder without a head."""

    def forward(self, inputs_embeds: Tensor, cache_position: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return hidden states [B, T, H] for embeddings float32 [B, T, H] at positions int64 [T]."""
        return self._call(inputs_embeds, cache_position)


def adapt(
    model: nn.Module,
    *,
    tokens: str,
    position: str,
    output: int | str | None = None,
    rows: bool = False,
    embeddings: bool = False,
    **others: Any,
) -> nn.Module:
    """Return the decode step of a module whose forward calls its inputs something else; `compile` takes it.

    The module keeps its weights, and its key and value caches are buffers of its own
    (docs/reference/step_protocol.md). `config`, `max_seq_len`, `tokens_per_frame` and sizes are taken over.

    Args:
        tokens: what its forward calls the token ids int64 [B, T], or with `embeddings` the inputs float32 [B, T, H].
        position: what it calls their positions, int64 [T]; with `rows` int64 [B, T], as `position_ids` often are.
        output: index, key or attribute of the logits in what it returns; None: it returns them alone.
        others: further inputs, the same in every step, such as cond_idx=None.

    Raises:
        InputError: an argument of another kind. CompileError: the forward has no such inputs, or needs further ones;
            all at once.
    """
    check_kind("model", model, nn.Module, "a decoder with a forward of its own")
    for name, value in (("tokens", tokens), ("position", position)):
        check_kind(name, value, str, "the name of an input of the model's forward")
    check_kind("output", output, (int, str, type(None)), "an index, a key or an attribute of what the forward returns")
    for name, value in (("rows", rows), ("embeddings", embeddings)):
        check_kind(name, value, bool, "True or False")
    taken = inspect.signature(model.forward).parameters
    given = (tokens, position, *others)
    anything = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    wrong = [] if anything else [f"takes no {name}" for name in given if name not in taken]
    wrong += [f"needs {name}" for name in needed(model) if name not in given]
    hint = f"its inputs are {', '.join(taken)}; give each that it needs by name, such as cond_idx=None"
    CompileError.raise_all([CompileError(f"{type(model).__name__}.forward {text}", hint=hint) for text in wrong])
    return (AdaptedHeadless if embeddings else Adapted)(model, tokens, position, rows, output, others)


def needed(model: nn.Module) -> list[str]:
    """Return the inputs of a module's forward that have no default."""
    taken = inspect.signature(model.forward).parameters.values()
    return [p.name for p in taken if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def suggestion(model: nn.Module) -> str | None:
    """Return the call of `adapt` for a module, by the names of its inputs; None: they do not say which is which."""
    taken = inspect.signature(model.forward).parameters
    tokens, position = _first(_TOKENS, taken), _first(_POSITIONS, taken)
    if tokens is None or position is None:
        return None
    words = [f'tokens="{tokens}"', f'position="{position}"']
    words += ["rows=True"] if position == "position_ids" else []
    words += ["embeddings=True"] if "embed" in tokens else []
    words += [f"{name}=…" for name in needed(model) if name not in (tokens, position)]
    return f"fc.adapt(model, {', '.join(words)})"


def _first(names: Sequence[str], taken: Any) -> str | None:
    return next((name for name in names if name in taken), None)
