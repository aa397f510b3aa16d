"""Memory layouts: what a model may write behind a tensor depends on its strides, which a rewrite may change."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.ir.query import is_op

aten = torch.ops.aten
_SAME_MEMORY = (aten.transpose, aten.permute, aten.t, aten.unsqueeze, aten.squeeze, aten.alias, aten.detach)


def free_views(node: fx.Node) -> None:
    """Turn views of a node, whose layout a rewrite has changed, into reshapes: they are right for any layout."""
    for user in node.users:
        if is_op(user, aten.view):
            user.target = aten.reshape.default
        elif is_op(user, *_SAME_MEMORY):
            free_views(user)
