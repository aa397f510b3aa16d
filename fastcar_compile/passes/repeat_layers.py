"""Layers of a checkpoint are captured once: the last one is copied until the decoder has all of its layers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.layers import role_nodes
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.patterns.layer_copy import HINT, LayerCopier, state_name


@dataclass(frozen=True)
class RepeatLayers(Pass):
    """Repeat the last layer in both graphs.

    1. Matches the nodes of the last two layers, by their metadata. Both layers must be equal but for names: that
       proves that the last one may stand for the ones after it.
    2. Copies the last layer until there are `count`. A copy reads what its predecessor makes.
    3. Parameters and state of a copy are named after its own number.
    Which layers of the model are alike is the front end's knowledge (`Skeleton.captured_layers`).

    Options:
        path: module path of the list of layers.
        count: layers of the whole decoder.
    """

    name: ClassVar[str] = "repeat-layers"
    path: str = ""
    count: int = 0

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError when the last two layers differ, or when fewer than two are there."""
        have = len(role_nodes(program.graph_module))
        if have == self.count:
            return False
        if program.config.ring is not None:
            what = "repeat-layers does not copy the ring caches of sparse-attention"
            raise CompileError(what, hint="name repeat-layers before sparse-attention in the pipeline")
        if have < 2 or have > self.count:
            raise CompileError(f"repeat-layers cannot make {self.count} layers out of {have}", hint=HINT)
        for module in program.graphs():
            LayerCopier(module, self.path, have).run(self.count)
        added = [
            dataclasses.replace(spec, name=state_name(spec.name, spec.layer, layer), layer=layer)
            for layer in range(have, self.count)
            for spec in program.state
            if spec.layer == have - 1
        ]
        program.state += added
        program.outputs += [s.name for s in added]
        if program.prefill is not None:
            program.prefill_outputs += [s.name for s in added]
        for layer in range(have, self.count):
            if program.lazy is not None:
                program.lazy.repeat(f"{self.path}.{have - 1}", f"{self.path}.{layer}")
        program.config = dataclasses.replace(program.config, num_layers=self.count)
        return True
