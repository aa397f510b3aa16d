"""Layers of a checkpoint are captured once: the last ones are copied until the decoder has all of its layers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from fastcar_compile.errors import CompileError
from fastcar_compile.ir.layers import role_nodes
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.passes.patterns.layer_copy import HINT, LayerCopier, state_name, template_of


@dataclass(frozen=True)
class RepeatLayers(Pass):
    """Repeat the last layers in both graphs.

    1. Matches the nodes of the last two blocks of `period` layers, by their metadata. Both blocks must be equal but
       for names: that proves that the last one may stand for the ones after it.
    2. Copies the last block until there are `count` layers. A copy reads what its predecessor makes.
    3. Parameters and state of a copy are named after its own number.
    Which layers of the model are alike is the front end's knowledge (`Skeleton.captured_layers`).

    Options:
        path: module path of the list of layers.
        count: layers of the whole decoder.
        period: layers after which their kinds repeat: 2 where local and global attention alternate.
    """

    name: ClassVar[str] = "repeat-layers"
    reason: ClassVar[str] = "Layers of a checkpoint are captured once; this one is a copy of the captured layer."
    path: str = ""
    count: int = 0
    period: int = 1

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError when the last two blocks differ, or when fewer than two are there."""
        have = len(role_nodes(program.graph_module))
        if have == self.count:
            return False
        self._check(program, have)
        for module in program.graphs():
            LayerCopier(module, self.path, have, self.period).run(self.count)
        for layer in range(have, self.count):
            self._add_state(program, template_of(layer, have, self.period), layer)
        program.config = dataclasses.replace(program.config, num_layers=self.count)
        return True

    def _check(self, program: DecoderProgram, have: int) -> None:
        if program.config.ring is not None:
            what = "repeat-layers does not copy the ring caches of sparse-attention"
            raise CompileError(what, hint="name repeat-layers before sparse-attention in the pipeline")
        if self.period < 1 or have < 2 * self.period or have > self.count or (self.count - have) % self.period:
            blocks = "" if self.period == 1 else f" in blocks of {self.period}"
            raise CompileError(f"repeat-layers cannot make {self.count} layers out of {have}{blocks}", hint=HINT)

    def _add_state(self, program: DecoderProgram, template: int, layer: int) -> None:
        """Give a copy its state and the recipes of its parameters."""
        own = [spec for spec in program.state if spec.layer == template]
        # Layer by layer, as `LayerCopier.run` returns the state of its copies.
        added = [dataclasses.replace(spec, name=state_name(spec.name, template, layer), layer=layer) for spec in own]
        program.state += added
        program.outputs += [s.name for s in added]
        if program.prefill is not None:
            program.prefill_outputs += [s.name for s in added]
        # Recipes made the captured layer's weights, where a pass
        # transposed or split them. A copy gets the same recipes.
        if program.lazy is not None:
            program.lazy.repeat(f"{self.path}.{template}", f"{self.path}.{layer}")
