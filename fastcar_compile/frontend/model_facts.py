"""What a model says of itself: sequence length, frame length, width, and whether it takes tokens or embeddings."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import cast

from torch import nn

from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.huggingface import is_huggingface


@dataclass(frozen=True)
class ModelFacts:
    """Facts read from a model's config and signature; None where the model does not say.

    Attributes:
        tokens_per_frame: tokens. max_seq_len: tokens. input_size: W of the embeddings that it takes.
        takes_embeddings: the decoder has no token embedding and no head of its own.
        context_length, context_size: of the context that a plain module's forward takes; None: it takes none.
        takes_context_mask: its forward takes a mask of the context too.
    """

    tokens_per_frame: int | None
    max_seq_len: int | None
    input_size: int | None
    takes_embeddings: bool
    context_length: int | None = None
    context_size: int | None = None
    takes_context_mask: bool = False

    @classmethod
    def of(cls, model: object) -> ModelFacts:
        """Read the facts of a Hugging Face model, a step-protocol module, or anything else (then all None)."""
        config = getattr(model, "config", None)

        def ask(*names: str) -> int | None:
            # The config comes before the module, and the first name before the others.
            found = [getattr(place, n, None) for n in names for place in (config, model)]
            return next((int(v) for v in found if isinstance(v, int)), None)

        taken = _arguments(model)
        headless = is_huggingface(model) and model.get_output_embeddings() is None
        return cls(
            tokens_per_frame=ask("tokens_per_frame"),
            max_seq_len=ask("max_position_embeddings", "max_seq_len"),
            input_size=ask("input_size", "hidden_size"),
            takes_embeddings=headless or "inputs_embeds" in taken,
            context_length=ask("context_length") if "context" in taken else None,
            context_size=ask("context_size") if "context" in taken else None,
            takes_context_mask="context_mask" in taken,
        )

    def require_input_size(self) -> int:
        """The width of its embeddings; CompileError where the model does not give it."""
        if self.input_size is None:
            hint = "set `hidden_size` on the module or on its config, or `input_size` where embeddings are wider"
            raise CompileError("a decoder that takes embeddings must give its hidden size", hint=hint)
        return self.input_size


def _arguments(model: object) -> Collection[str]:
    """Return the names that a plain module's forward takes."""
    if not isinstance(model, nn.Module) or is_huggingface(model):
        return ()
    return inspect.signature(model.forward).parameters


# The caller's model as it was written: wrappers off for the capture; modes and compiled calls put back afterwards.


_COMPILED = "_orig_mod"
"""Where torch.compile keeps the module that it wraps."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of torch.compile, of data parallelism and of peft's adapters.

    Raises:
        CompileError: a peft model puts learned tokens or prefixes in front of the sequence.
    """
    while (inner := _inner(model)) is not None:
        model = inner
    return model


def _inner(model: nn.Module) -> nn.Module | None:
    children = dict(model.named_children())
    if _COMPILED in children:
        return children[_COMPILED]
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return children["module"]
    base = getattr(model, "get_base_model", None)  # peft need not be installed to be recognised
    if base is None:
        return None
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        what = f"{type(model).__name__} is prompt learning: it puts learned tokens or prefixes in front of the sequence"
        hint = "give the base model and feed the learned tokens as a prompt, or train LoRA adapters"
        raise CompileError(what, hint=hint)
    return cast("nn.Module", base())


@contextmanager
def as_written(model: nn.Module) -> Generator[None]:
    """Put every module in evaluation mode, without compiled calls; on exit each gets back what it had."""
    with ExitStack() as stack:
        for module in list(model.modules()):
            # `model.eval()` sets every module, and a caller may have left parts in training.
            for name in ("training", "_compiled_call_impl"):
                stack.callback(setattr, module, name, getattr(module, name))
            module._compiled_call_impl = None
            for name, child in module.named_children():
                if _COMPILED in dict(child.named_children()):
                    stack.callback(setattr, module, name, child)
                    setattr(module, name, unwrapped(child))
        model.eval()
        yield
