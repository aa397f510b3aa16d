"""Structures that have no replay: named in the model, so that a refusal says what is the reason.

Nothing is refused here. Where a capture or a match failed, what is found explains the failure. So names of attributes
may help to word it; they never decide what compiles.
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import nn

from fastcar_compile.errors import CompileError, UserError, count_text
from fastcar_compile.frontend.adapt import suggestion
from fastcar_compile.ir.provenance import importable_path
from fastcar_compile.support.values import warn

_REPLAY = "replay is defined for attention over a key/value cache and an MLP of two or three linears"

_CONTEXT_HINT = (
    "set context_length = L and context_size = C on the module, for context float32 [B, L, C], as "
    "docs/reference/step_protocol.md has it"
)


_STEP_INPUTS = ("input_ids", "inputs_embeds", "cache_position", "context", "context_mask")
_BIASES = ("build_alibi_tensor", "build_mpt_alibi_tensor", "relative_attention_bias", "alibi_slopes")
_PADDING = ("attention_mask", "padding_mask", "key_padding_mask", "position_ids")


@dataclass(frozen=True)
class Structure:
    """A structure: what it is called, what it means for a decode step, what works instead; the modules that have it."""

    name: str
    meaning: str
    hint: str
    places: tuple[str, ...]

    def problem(self, model: nn.Module) -> CompileError:
        """Return it as an error with module path and source line."""
        first, *others = self.places
        count = f" ({len(others) + 1} of them)" if others else ""
        where = f"{first or type(model).__name__}, {_source(dict(model.named_modules())[first])}{count}"
        return CompileError(f"the model has {self.name}: {self.meaning}", where=where, hint=self.hint)


def explained(model: nn.Module, error: CompileError) -> CompileError:
    """Return the error with the structures that are its reason in the place of its symptoms; else the error itself."""
    found = structures_of(model)
    if not found:
        return error
    # A symptom inside of a layer with such a structure follows from it. Others are reported beside it.
    places = {place for structure in found for place in structure.places}
    others = [p for p in error.problems or (error,) if _is_elsewhere(p, places)]
    return CompileError.collect([*(structure.problem(model) for structure in found), *others])


def _is_elsewhere(problem: UserError, places: set[str]) -> bool:
    """Whether the problem is at a node of the graph, in a layer that has none of the structures."""
    path, *rest = problem.where.split(", ")
    at_node = any(part.startswith("node ") for part in (path, *rest))
    return at_node and not any(_shares_a_layer(path, place) for place in places)


def _shares_a_layer(path: str, place: str) -> bool:
    parts = place.split(".")
    layer = next((parts[: i + 1] for i, part in enumerate(parts) if part.isdigit()), parts[:0])
    return path.split(".")[: len(layer)] == layer


def structures_of(model: nn.Module) -> list[Structure]:
    """Return the structures of a model that have no replay."""
    found: list[Structure] = []
    for name, (has, meaning, hint) in _STRUCTURES.items():
        paths = [path for path, module in model.named_modules() if has(module)]
        innermost = tuple(p for p in paths if not any(q.startswith(f"{p}.") for q in paths))
        if places := ("",) if has(model) else innermost:
            found.append(Structure(name, meaning, hint, places))
    return found


def _has_experts(module: nn.Module) -> bool:
    """Whether a router beside several alike MLPs, or beside stacked weights [E, N, K], has a row for each of them."""
    for name, child in module.named_children():
        # A router is a matrix with one row for each expert.
        count = _alike(child)
        others = (p for n, p in module.named_parameters() if not n.startswith(f"{name}."))
        if count > 1 and any(p.dim() == 2 and p.shape[0] == count for p in others):
            return True
    return False


def _alike(module: nn.Module) -> int:
    """How many MLPs a module holds side by side; 0: it holds none so."""
    stacked = [p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3]
    if stacked and not isinstance(module, nn.modules.conv._ConvNd):
        return stacked[0]
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return 0
    kinds = {tuple((n, tuple(p.shape)) for n, p in m.named_parameters()) for m in module}
    linears = sum(isinstance(m, nn.Linear) for m in module[0].modules())
    return len(module) if len(kinds) == 1 and linears in (2, 3) else 0


def _is_recurrent(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    heads = config is None or hasattr(config, "num_attention_heads") or not hasattr(config, "context_length")
    return isinstance(module, nn.RNNBase | nn.RNNCellBase) or not heads


def _config_says(name: str) -> Callable[[nn.Module], bool]:
    return lambda module: bool(getattr(getattr(module, "config", None), name, False))


_STRUCTURES: dict[str, tuple[Callable[[nn.Module], bool], str, str]] = {
    "an encoder and a decoder": (
        _config_says("is_encoder_decoder"),
        "its decoder attends to what an encoder made of another sequence (cross-attention)",
        "compile its decoder as a plain module that takes what the encoder made as `context`",
    ),
    "cross-attention": (
        _config_says("add_cross_attention"),
        "its layers attend to another sequence, which Transformers' static caches do not give a decode step",
        "write it as a plain module that takes the sequence as `context`, or build it with add_cross_attention=False",
    ),
    "a mixture of experts": (
        _has_experts,
        "a router chooses the MLP of each token, so that no MLP has the outputs of one frame earlier",
        "compile a dense decoder, such as the family's model without experts",
    ),
    "a state-space layer or another one with a convolution along time": (
        # One filter per channel runs along time, as in state-space and linear-attention layers.
        lambda module: any(isinstance(m, nn.Conv1d) and m.groups == m.in_channels > 1 for m in module.children()),
        f"it carries a state of its own from token to token, and {_REPLAY}",
        "compile a decoder whose layers all have attention",
    ),
    "a recurrent cell": (
        _is_recurrent,
        f"it carries a state of its own from token to token, and {_REPLAY}",
        "compile a decoder whose layers all have attention",
    ),
    "multi-head latent attention": (
        lambda module: hasattr(module, "kv_lora_rank") and hasattr(module, "kv_b_proj"),
        "it caches one latent per token, from which every step makes the keys and values of all positions again",
        "compile a decoder that caches keys and values: multi-head, grouped-query or multi-query attention",
    ),
    "ALiBi or another bias of the attention scores": (
        lambda module: any(hasattr(module, name) for name in _BIASES) or _config_says("alibi")(module),
        "attention is compiled with a causal mask or a window, and nothing added to the scores",
        "compile a decoder with rotary or learned positions",
    ),
}


def _source(module: nn.Module) -> str:
    """File and line of a module's forward."""
    code = inspect.unwrap(type(module).forward).__code__
    return f"{importable_path(code.co_filename)}:{code.co_firstlineno}"


def check_adapters(model: nn.Module) -> None:
    """Raise CompileError where peft's low-rank adapters stand beside linears."""
    found = [(name, getattr(module, "lora_A", None)) for name, module in model.named_modules()]
    # Once merged and unloaded, the dictionary is empty or gone. Other things may have this name.
    if adapted := [name for name, part in found if isinstance(part, nn.ModuleDict) and len(part)]:
        what = f"{count_text(len(adapted), 'module')} of the model with LoRA adapters, such as {adapted[0]}"
        raise CompileError(what, hint="merge them first: model = model.merge_and_unload()")


def check_device(model: nn.Module) -> None:
    """Raise CompileError where parameters or buffers are elsewhere than in main memory, or have no values."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    elsewhere = [(name, t) for name, t in tensors if t.device.type != "cpu"]
    if not elsewhere:
        return
    name, tensor = elsewhere[0]
    what = f"{len(elsewhere)} of the model's {len(tensors)} tensors are on the device {tensor.device}, such as {name}"
    hint = "give model.cpu()"
    if tensor.is_meta:
        what += ": tensors on the meta device have no values"
        hint = "load the weights (from_pretrained without device_map), or give the path of the model's folder, which "
        hint += "is read tensor by tensor; a dry run of a folder needs its config.json only"
    raise CompileError(what, where=type(model).__name__, hint=hint)


def check_signature(model: nn.Module) -> None:
    """Raise CompileError where a plain module's forward is no step over one token per row."""
    taken = inspect.signature(model.forward).parameters
    named = {n: p for n, p in taken.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    anything = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    if anything or ("cache_position" in taken and {"input_ids", "inputs_embeds"} & set(taken)):
        _check_context(model, taken)
        _check_others(model, [p for n, p in named.items() if n not in _STEP_INPUTS])
        return
    what = f"{type(model).__name__}.forward takes ({', '.join(taken)}), which is no decode step over one token per row"
    call = suggestion(model)
    hint = "" if call is None else f"give {call}, or "
    hint += (
        "write forward(input_ids [B, T] | inputs_embeds [B, T, H], cache_position [T]), as "
        "docs/reference/step_protocol.md has it. A model that makes several tokens per step, such as a next-scale or a "
        "masked one, has no such step"
    )
    raise CompileError(what, where=_source(model), hint=hint)


def _check_others(model: nn.Module, others: list[inspect.Parameter]) -> None:
    """Raise CompileError where the forward needs what no decode step has; warn of a mask that it may take."""
    if missing := [p.name for p in others if p.default is p.empty]:
        what = f"{type(model).__name__}.forward needs {', '.join(missing)}, which a decode step does not have"
        hint = "all rows share their positions and none has padding: work masks and positions out from cache_position, "
        hint += "and make other inputs buffers, or constants: fc.adapt"
        raise CompileError(what, where=_source(model), hint=hint)
    if padding := [p.name for p in others if p.name in _PADDING]:
        text = f"{type(model).__name__}.forward may take {', '.join(padding)}, which a decode step leaves out: "
        text += "all rows share their positions, so that rows with padding decode wrongly"
        warn(text, 2)


def _check_context(model: nn.Module, taken: Collection[str]) -> None:
    """Raise CompileError where the forward takes a context whose sizes the module does not give."""
    missing = [name for name in ("context_length", "context_size") if not isinstance(getattr(model, name, None), int)]
    if "context_mask" in taken and "context" not in taken:
        raise CompileError("forward takes context_mask, but no context", where=_source(model), hint=_CONTEXT_HINT)
    if "context" in taken and missing:
        what = f"forward takes a context, but {type(model).__name__} does not say its {' and '.join(missing)}"
        raise CompileError(what, where=_source(model), hint=_CONTEXT_HINT)
