"""nn.Module or ExportedProgram -> DecoderProgram: one decode step and one prefill chunk over a static KV cache."""

import io
import logging
import sys
import traceback
import warnings
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fastcar_compile.errors import NOT_THE_MODELS, CompileError, UserError
from fastcar_compile.frontend.adapt import Adapted
from fastcar_compile.frontend.checkpoint import Checkpoint
from fastcar_compile.frontend.huggingface import WRAPPED_MODEL, StaticCacheStep, is_huggingface, static_cache_step
from fastcar_compile.frontend.importer import OTHER_FLOATS, REASONS, check_exported, check_module_names, import_exported
from fastcar_compile.frontend.model_facts import ModelFacts, as_written, unwrapped
from fastcar_compile.frontend.structures import check_adapters, check_device, check_signature
from fastcar_compile.ir.dataflow import ancestors
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import error_at, importable_path
from fastcar_compile.ir.query import is_op, node_arg, output_nodes, shape_of
from fastcar_compile.ir.types import ContextInput, DecoderConfig
from fastcar_compile.ir.weights import LazyWeights

aten = torch.ops.aten


# What torch.export says, as a sentence with the place in the user's model.


_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[1])
_LONGEST = 200
_PROTOCOL = "docs/reference/step_protocol.md"


def depends_on_data(error: BaseException) -> bool:
    """Return whether Python asked for a value that only a run of the step knows."""
    return isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in str(error)


@contextmanager
def silenced(*names: str) -> Generator[None]:
    """Let loggers say nothing: torch logs the stack of an error that it raises too."""
    with ExitStack() as stack:
        for log in map(logging.getLogger, names):
            stack.callback(setattr, log, "disabled", log.disabled)
            log.disabled = True
        yield


def export_error(step: nn.Module, error: Exception, arguments: Mapping[str, Any]) -> CompileError:
    """Return the error of a call with these tensors as one sentence; the caller raises it from the original."""
    place = _place(step, error.__traceback__)
    if depends_on_data(error):
        what = "Python control flow, a shape or an index depends on the value of a tensor"
        hint = "compute it with tensor operators (torch.where, a mask, index_select): each step is the same graph"
        return CompileError(what, where=place, hint=hint)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    given = ", ".join(f"{n} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for n, t in arguments.items())
    what = f"the decode step cannot be traced with {given}: {type(error).__name__}: {lines[0][:_LONGEST]}"
    hint = "the forward must run on one token in each of batch_size rows, with static caches of as many; with rows= "
    hint += "also on a chunk of one video, or give prefill_chunk=1; "
    hint += "codes of one position, [B, T, D], become embeddings before the step (inputs_embeds [B, T, H]); see "
    return CompileError(what, where=place, hint=hint + _PROTOCOL)


def _place(step: nn.Module, trace: TracebackType | None) -> str:
    """Module path and source line of the deepest frame in the model's own code."""
    names = (_TORCH, _OWN, "<")
    frames = [(f, line) for f, line in traceback.walk_tb(trace) if not f.f_code.co_filename.startswith(names)]
    paths = {id(module): path for path, module in step.named_modules()}
    # The deepest frame with a module as `self` gives a path in the model, which says more than a line.
    for frame, line in reversed(frames):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and paths.get(id(owner)):
            wrapped = isinstance(step, StaticCacheStep | Adapted)
            inner = paths[id(owner)].removeprefix(f"{WRAPPED_MODEL}.") if wrapped else paths[id(owner)]
            return f"{inner}, {importable_path(frame.f_code.co_filename)}:{line}"
    if frames:
        frame, line = frames[-1]
        return f"{importable_path(frame.f_code.co_filename)}:{line}"
    return type(step).__name__


# A decode step must be a function of its inputs: what draws random numbers is refused.


_DROPOUT = (aten.dropout, aten.native_dropout, aten.alpha_dropout, aten.feature_dropout)
_DRAWS: tuple[Any, ...] = (aten.rand, aten.randn, aten.randint, aten.rand_like, aten.randn_like, aten.bernoulli)
_DRAWS += (aten.multinomial, aten.normal, aten.uniform_, aten.bernoulli_, aten.normal_, aten.exponential_)


def check_deterministic(graph: fx.Graph) -> None:
    """Raise CompileError with every operator that draws random numbers."""
    problems: list[CompileError] = []
    for node in graph.nodes:
        # The third argument is `train`; it must be False literally.
        if is_op(node, *_DROPOUT) and node.args[2:3] != (False,):
            what = "dropout is active in a model that is not training"
            hint = "use nn.Dropout, or give F.dropout training=self.training: its default is True"
            problems.append(error_at(node, what, hint))
        elif is_op(node, *_DRAWS):
            what = f"the decode step draws random numbers ({node.target})"
            problems.append(error_at(node, what, "return logits from the step, and sample outside of it"))
    CompileError.raise_all(problems)


_LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


@contextmanager
def plain_modes() -> Generator[None]:
    """Leave the caller's modes and defaults, which would change the tensors and the types of a graph."""
    before, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        # A block with a device costs time at every call of torch.
        own_device = nullcontext() if device.type == "cpu" else torch.device("cpu")
        with own_device, torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_default_dtype(before)


@plain_modes()
def capture(
    model: nn.Module | ExportedProgram | Checkpoint,
    *,
    batch_size: int,
    max_seq_len: int,
    tokens_per_frame: int,
    prefill_chunk: int,
    rows: int | None = None,
) -> DecoderProgram:
    """Capture a decoder.

    Args:
        model: a Hugging Face decoder, a module that follows docs/reference/step_protocol.md, its export, or a
            checkpoint: then only `skeleton.captured_layers` of its layers, and no weight is read.
        batch_size: rows B. max_seq_len: cache capacity S in tokens. tokens_per_frame: F.
        prefill_chunk: tokens per prefill call; an ExportedProgram has no prefill graph.
        rows: of each video in the decode step. That has batch_size * rows rows, as if each were a video; the pass
            `decode-rows` lets them share. The prefill graph reads one video then: they stand at positions of their own.
            None: one row of each, and all videos share one position.

    Raises:
        CompileError: the model does not follow the step protocol, or cannot be exported.
    """
    lazy = None
    if isinstance(model, Checkpoint):
        model, lazy = model.model(), LazyWeights(model)
    if isinstance(model, nn.Module):
        model = unwrapped(model)
        check_module_names(model)
        check_adapters(model)
        check_device(model)
    if isinstance(model, ExportedProgram):
        # An export has one shape, that of a decode step, so it has no prefill graph.
        check_exported(model)
        graphs = [import_exported(model)]
    else:
        prefill_chunk = min(prefill_chunk, max_seq_len)
        facts = ModelFacts.of(model)
        wrapper = WRAPPED_MODEL if is_huggingface(model) or isinstance(model, Adapted) else ""
        calls = [(batch_size * (rows or 1), 1)]
        calls += [(batch_size if rows is None else 1, prefill_chunk)] if prefill_chunk > 1 else []
        graphs = list[fx.GraphModule]()
        with _in_float32(model):  # one copy for all graphs
            for batch, tokens in calls if calls[0][0] != calls[-1][0] else [(calls[0][0], None)]:
                # Static caches are as many as the rows of a call.
                with step_module(model, batch, max_seq_len) as (step, headless):
                    lengths = [tokens] if tokens is not None else [length for _, length in calls]
                    graphs += [import_exported(_export(step, facts, batch, n, headless), wrapper) for n in lengths]
    graph, chunk = graphs[0], graphs[1] if len(graphs) > 1 else None
    # The decode step stands for both graphs: one module made them.
    check_deterministic(graph.graph)
    for module in graphs:
        _check_rows(module.graph)
    config = _config(graph, chunk, max_seq_len, tokens_per_frame, prefill_chunk)
    return DecoderProgram(graph, chunk, config, outputs=["logits"], reasons=dict(REASONS), lazy=lazy)


@contextmanager
def step_module(model: nn.Module, batch_size: int, max_seq_len: int) -> Generator[tuple[nn.Module, bool]]:
    """The float32 model as a step-protocol module, and whether it takes embeddings."""
    headless = ModelFacts.of(model).takes_embeddings
    with as_written(model):
        if is_huggingface(model):
            with static_cache_step(model, batch_size, max_seq_len) as step:
                yield step, headless
        else:
            check_signature(model)
            yield model, headless


@contextmanager
def _in_float32(model: nn.Module) -> Generator[None]:
    """Give every module its tensors in float32, and as tensors that a capture may use; on exit its own ones."""
    tables: list[dict[str, Any]] = [t for module in model.modules() for t in (module._parameters, module._buffers)]
    made: dict[int, torch.Tensor] = {}  # several modules may share a tensor, and go on doing so
    with ExitStack() as stack:
        for table in tables:
            for name, tensor in list(table.items()):
                if tensor is not None and (tensor.is_inference() or tensor.dtype in OTHER_FLOATS):
                    stack.callback(table.__setitem__, name, tensor)
                    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
                    own = tensor.detach().to(dtype, copy=True)
                    own = nn.Parameter(own, requires_grad=False) if isinstance(tensor, nn.Parameter) else own
                    table[name] = made.setdefault(id(tensor), own)
        yield


def _export(step: nn.Module, facts: ModelFacts, batch: int, tokens: int, embeddings: bool) -> ExportedProgram:
    # The parameters of a checkpoint's model are fake tensors. Inputs of another fake mode could not meet them.
    with detect_fake_mode(list(step.parameters())) or nullcontext():
        arguments: dict[str, Any] = {"cache_position": torch.arange(tokens)}
        if embeddings:
            arguments["inputs_embeds"] = torch.zeros(batch, tokens, facts.require_input_size())
        else:
            arguments["input_ids"] = torch.zeros(batch, tokens, dtype=torch.int64)
        if facts.context_length is not None and facts.context_size is not None:
            arguments["context"] = torch.zeros(batch, facts.context_length, facts.context_size)
            if facts.takes_context_mask:
                arguments["context_mask"] = torch.ones(batch, facts.context_length, dtype=torch.bool)
    # A Hugging Face step is tried without explicit positions first. What the model works out from the cache's length
    # may be a Python number: then it raises, or the export holds an `item` of the position.
    implicit = step if isinstance(step, StaticCacheStep) and step.can_be_explicit() else None
    try:
        exported = _exported(step, arguments)
    except (UserError, *NOT_THE_MODELS):
        raise
    except Exception as error:
        if implicit is None or not depends_on_data(error):
            raise export_error(step, error, arguments) from error
    else:
        if implicit is None or not _counts_in_python(exported):
            return exported
    # Once only: `can_be_explicit` is False afterwards, so an error of the second export is reported.
    implicit.explicit = True
    return _export(step, facts, batch, tokens, embeddings)


def _counts_in_python(exported: ExportedProgram) -> bool:
    """Whether the model made a Python number of the position, so that the graph is right at one position only."""
    graph = exported.graph
    position = next(n for n in graph.nodes if n.op == "placeholder" and n.target == "cache_position")
    return any(position in ancestors(n) for n in graph.nodes if is_op(n, torch.ops.aten.item))


def _exported(step: nn.Module, arguments: dict[str, Any]) -> ExportedProgram:
    """What torch.export makes of the step. Where it fails it prints the graph so far, which says nothing to a user."""
    said = io.StringIO()
    with warnings.catch_warnings(), redirect_stderr(said), silenced(*_LOGS):
        # Caches are plain attributes of HF's cache object; torch.export says so, and lifts them all the same.
        warnings.filterwarnings("ignore", message="A model attribute .* requires gradient")
        exported = torch.export.export(step, (), arguments, strict=False)
    sys.stderr.write(said.getvalue())
    return exported


def _check_rows(graph: fx.Graph) -> None:
    """Raise CompileError unless the graph returns a row for each of its tokens."""
    (result,) = output_nodes(graph)
    output, tokens = result.meta["val"], next(iter(graph.nodes)).meta["val"]
    if output.dim() == 3 and output.shape[:2] == tokens.shape[:2]:
        return
    what = f"the step returns shape {tuple(output.shape)}; expected [B, T, V] or [B, T, H], with B = "
    what += f"{tokens.shape[0]} and T = {tokens.shape[1]}"
    hint = "return logits or hidden states of every position: a session takes the row that it needs. A head on the "
    hint += "last position alone needs prefill_chunk=1, and [:, -1:] instead of [:, -1]"
    raise error_at(result, what, hint)


def _config(graph: Any, chunk: Any, max_seq_len: int, tokens_per_frame: int, prefill_chunk: int) -> DecoderConfig:
    tokens = next(n for n in graph.graph.nodes if n.op == "placeholder")
    embeddings = tokens.target == "inputs_embeds"
    # A session refuses token ids beyond the rows of the table that they select.
    tables = [node_arg(user, 0) for user in tokens.users if is_op(user, torch.ops.aten.embedding)]
    output = graph.graph.output_node().args[0][0].meta["val"]
    return DecoderConfig(
        batch_size=int(tokens.meta["val"].shape[0]),
        max_seq_len=max_seq_len,
        tokens_per_frame=tokens_per_frame,
        # find-sites counts the layers, and reads the hidden size off the residual stream. Then it is known, too,
        # whether a decoder that takes embeddings has a head.
        num_layers=0,
        hidden_size=0,
        vocab_size=int(output.shape[-1]),
        takes_embeddings=embeddings,
        prefill_chunk=prefill_chunk if chunk is not None else 0,
        embedding_rows=min((shape_of(table)[0] for table in tables), default=None),
        context=_context(graph.graph),
        input_size=int(tokens.meta["val"].shape[-1]) if embeddings else None,
    )


def _context(graph: fx.Graph) -> ContextInput | None:
    """Return the context that the step reads; None: it reads none.

    Raises:
        CompileError: it is of another shape than a context.
    """
    inputs = {str(n.target): n.meta["val"] for n in graph.find_nodes(op="placeholder")}
    found = {name: value for name, value in inputs.items() if name in ("context", "context_mask")}
    if not found:
        return None
    # A mask without a context is refused below: `context` is None then.
    context, mask = found.get("context"), found.get("context_mask")
    if context is not None and context.dim() == 3 and context.dtype == torch.float32:
        batch, length, size = (int(d) for d in context.shape)
        if mask is None or (mask.dtype == torch.bool and tuple(mask.shape) == (batch, length)):
            return ContextInput(length=length, size=size, masked=mask is not None)
    given = ", ".join(f"{name} {str(v.dtype).removeprefix('torch.')}{list(v.shape)}" for name, v in found.items())
    hint = "take context float32 [B, L, C], and with it context_mask bool [B, L] where it has padding"
    raise CompileError(f"the step takes {given}, which is no context for cross-attention", hint=hint)
