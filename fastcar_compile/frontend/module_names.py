"""Names of modules and tensors: torch.fx writes them into source code, and a graph file has to be readable again."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fastcar_compile.errors import CompileError, count_text
from fastcar_compile.ir.names import is_path

_HINT = "rename it: letters, digits, blanks and . _ - + : / @ [ ], at most 1,000 in a whole path"


def check_module_names(model: nn.Module) -> None:
    """Raise CompileError unless every module, parameter and buffer has a name that a graph file can hold."""
    named = (model.named_modules(), model.named_parameters(), model.named_buffers())
    check_paths(name for pairs in named for name, _ in pairs if name)


def check_paths(names: Iterable[str]) -> None:
    """Raise CompileError for a name that a graph file cannot hold, with all such names."""
    wrong = [name for name in names if not is_path(name)]
    if wrong:
        # Sorted by length: a module's name comes before those of its parameters.
        first = min(wrong, key=len)
        raise CompileError(
            f"{count_text(len(wrong), 'name')} of the model cannot be written", where=f"{first!a:.200}", hint=_HINT
        )
