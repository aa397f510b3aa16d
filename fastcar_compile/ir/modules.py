"""Graph modules and what they hold: placeholders, tensor attributes, branches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule  # pyright: ignore[reportPrivateUsage]  (fx has no public one)

from fastcar_compile.errors import InternalError


def graph_module(root: nn.Module | Mapping[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Return a module of the graph whose Python code is generated at its first call.

    A build mostly never calls it. Generating the code of all branches would take a good part of the passes' time.
    """
    return _GraphModule(root if isinstance(root, nn.Module) else dict(root), graph)


class _GraphModule(_LazyGraphModule):
    """A lazy module whose first call is one call for hooks, too; torch's own class calls the module again."""

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.real_recompile()
        return type(self).forward(self, *args, **kwargs)

    forward = _lazy_forward

    def print_readable(self, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
        """Return the code, without the releases of memory that fx writes behind a value's last use: `; x = None`."""
        # `on_generate_code` is undone on exit, so code that runs keeps its releases of memory.
        with ExitStack() as stack:
            for part in self.modules():
                if isinstance(part, fx.GraphModule):
                    stack.enter_context(part.graph.on_generate_code(lambda _before: _without_releases))
            return super().print_readable(print_output, *args, **kwargs)


def _without_releases(body: list[str]) -> list[str]:
    """Return the lines of a body that fx has generated; a release is an item of its own."""
    kept = (line for line in body if not line.strip().startswith("# No stacktrace found"))
    return ["\n" if line.startswith(";  ") else line for line in kept]


def placeholder_names(module: fx.GraphModule) -> list[str]:
    """Return the placeholder names in order."""
    return [str(n.target) for n in module.graph.nodes if n.op == "placeholder"]


def get_attribute(module: nn.Module, path: str) -> object:
    """Return the attribute at a dotted path."""
    value: object = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def tensor_attribute(module: nn.Module, path: str) -> Tensor:
    """Return the tensor at a dotted path.

    Raises:
        InternalError: what is there is no tensor.
    """
    value = get_attribute(module, path)
    if not isinstance(value, Tensor):
        raise InternalError(f"attribute {path} is a {type(value).__name__}, not a tensor")
    return value


def tensor_attributes(module: fx.GraphModule) -> dict[str, Tensor]:
    """Return the tensors that `get_attr` nodes read, by attribute path."""
    found: dict[str, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = get_attribute(module, str(node.target))
            if isinstance(value, Tensor):
                found[str(node.target)] = value
    return found


def branches_of(module: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """Return the branches that `get_attr` nodes read, by attribute name."""
    # A branch that no `cond` reads any more stays a submodule, but is no part of the program.
    used = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
    return {name: m for name, m in module.named_children() if isinstance(m, fx.GraphModule) and name in used}


def with_branches(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield the module and its branches."""
    yield module
    yield from branches_of(module).values()
