"""fuse-norms: a root-mean-square norm that is written out, and a layer norm over the last axis, become one operator."""

from __future__ import annotations

import torch
from torch import fx

from fastcar_compile.codegen.tvm.fusion.rewrite import replace
from fastcar_compile.passes.patterns.norms import layer_norm, rms_norm

fastcar = torch.ops.fastcar
NAME = "fuse-norms"


def fuse_norms(graph: fx.Graph) -> None:
    """Replace every norm that has a kernel. A layer norm of another form stays TVM's own."""
    for node in list(graph.nodes):
        # The nodes of the pattern stay where they are: without readers they go as dead code.
        if (found := rms_norm(node)) is not None:
            replace(node, fastcar.rms_norm.default, found, NAME)
        elif (found := layer_norm(node)) is not None:
            replace(node, fastcar.layer_norm.default, found, NAME)
