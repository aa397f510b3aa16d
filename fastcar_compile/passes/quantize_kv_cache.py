"""Keys and values cached in fewer bytes: float16, or int8 with an exponent per block of 32."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import fx

from fastcar_compile.config.formats import KV_TYPES
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.ops.operator import row_size
from fastcar_compile.ir.pass_manager import Pass
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.provenance import error_at
from fastcar_compile.ir.query import is_op, placeholder, shape_of
from fastcar_compile.ir.rewrite import fake_like, fake_value
from fastcar_compile.ir.types import ATTENTION_ROLES

fastcar = torch.ops.fastcar
TYPES = {name: getattr(torch, name) for name in KV_TYPES if name != "float32"}
"""float32 is what a captured decoder has."""


@dataclass(frozen=True)
class QuantizeKvCache(Pass):
    """Give the key and value caches of both graphs another type.

    1. Matches every float32 state of role key_cache or value_cache.
    2. Its placeholder and what is written of it get the type. No node is added: an operator that writes a cache rounds
       to the cache's type (`ops.cached.stored`), and one that reads it widens the rows to float32.

    Options:
        dtype: "float16" or "int8"; a row of the latter is longer by its exponents.
    """

    name = "quantize-kv-cache"
    reason = "Keys and values are cached in fewer bytes."
    dtype: str = "float16"

    def apply(self, program: DecoderProgram) -> bool:
        """Raise CompileError for an unknown type, and where an operator that takes float32 only reads a cache."""
        if self.dtype not in TYPES:
            hint = f"use one of: {', '.join(sorted(TYPES))}"
            raise CompileError(f"no cache has the type {self.dtype!r}", where=self.name, hint=hint)
        caches = [s for s in program.state if s.role in ATTENTION_ROLES and s.dtype == torch.float32]
        for module in program.graphs():
            for spec in caches:
                self._quantize(module.graph, spec.name)
        made = {s: dataclasses.replace(s, shape=self._shape(s.shape), dtype=TYPES[self.dtype]) for s in caches}
        program.state = [made.get(s, s) for s in program.state]
        return bool(caches)

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:3], row_size(shape[3], self.dtype))

    def _quantize(self, graph: fx.Graph, name: str) -> None:
        """Give a cache and what is written of it their new type."""
        cache = placeholder(graph, name)
        stored = torch.empty(self._shape(shape_of(cache)), dtype=TYPES[self.dtype], device="meta")
        cache.meta["val"] = fake_like(graph, stored)
        for write in cache.users:
            if not is_op(write, fastcar.cache_write, fastcar.ring_write):
                raise self._unknown(cache, write)
            # What the write returns follows from its cache: another type, and longer rows for int8.
            write.meta["val"] = fake_value(graph, write)
            # An ATen operator would take mantissas and exponents for keys.
            for reader in write.users:
                if reader.op != "output" and getattr(reader.target, "namespace", "") != "fastcar":
                    raise self._unknown(write, reader)

    def _unknown(self, cache: fx.Node, user: fx.Node) -> CompileError:
        what = f"{self.dtype} caches: {user.target} reads {cache.name} itself"
        return error_at(user, what, f'use kv="float32", or run {self.name} after normalize-state')
