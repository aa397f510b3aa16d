"""fuse-rotary: a rotary position embedding that is written out becomes one operator."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.codegen.tvm.fusion.rewrite import replace
from fastcar_compile.passes.patterns.rotary import rotary

fastcar = torch.ops.fastcar
NAME = "fuse-rotary"


def fuse_rotary(graph: fx.Graph) -> None:
    """Replace every rotary embedding of four axes."""
    for node in list(graph.nodes):
        if (found := rotary(node)) is not None:
            replace(node, fastcar.rotary.default, found, NAME)
