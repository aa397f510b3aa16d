"""What an ExportedProgram must be before it can be imported: a module is brought there, an export is as it is."""

from __future__ import annotations

import torch
from torch import SymInt, Tensor
from torch.export import ExportedProgram

from fastcar_compile.errors import CompileError, count_text
from fastcar_compile.frontend.module_names import check_paths

TOKEN_NAMES = {"input_ids": "tokens", "tokens": "tokens", "inputs_embeds": "inputs_embeds"}
POSITION_NAMES = ("cache_position", "position")
_MEND_SHAPE = "export the step for fixed shapes: one token per row [B, 1] (or [B, 1, H]) and cache_position [1]"


def check_exported(exported: ExportedProgram) -> None:
    """Check shapes and precision.

    Raises:
        CompileError: dynamic shapes, more than one token per step, or another precision than float32; all at once.
    """
    problems = [CompileError(t, where="inputs of the exported program", hint=_MEND_SHAPE) for t in _shapes(exported)]
    tensors = {**exported.state_dict, **exported.constants}
    check_paths(tensors)
    other = {n: t.dtype for n, t in tensors.items() if isinstance(t, Tensor) and _is_other_precision(t)}
    if other:
        dtypes = sorted({str(dtype).removeprefix("torch.") for dtype in other.values()})
        first = next(iter(other))
        what = f"the exported program holds {count_text(len(other), 'tensor')} of {', '.join(dtypes)}, first {first}"
        problems.append(CompileError(what, hint="export module.float(), or give the module itself"))
    if problems:
        raise CompileError.collect(problems)


def _is_other_precision(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float32


def _shapes(exported: ExportedProgram) -> list[str]:
    found: list[str] = []
    names = set(exported.graph_signature.user_inputs)
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or node.name not in names or not isinstance(value, Tensor):
            continue
        shape: tuple[int | SymInt, ...] = tuple(value.shape)
        # One shape error is enough for each input; later checks compare sizes as numbers.
        if any(isinstance(d, SymInt) for d in shape):
            found.append(f"input {node.name} has the dynamic shape [{', '.join(map(str, shape))}]")
        elif node.name in TOKEN_NAMES and (value.dim() < 2 or value.shape[1] != 1):
            found.append(f"input {node.name} has shape {list(value.shape)}, but a decode step takes one token per row")
        elif node.name in POSITION_NAMES and (value.dim() != 1 or (value.numel() != 1 and not found)):
            what = f"input {node.name} has shape {list(value.shape)}, but the rows of a step share one position, [1]"
            found.append(f"{what}: rows with padding are not supported")
    return found
