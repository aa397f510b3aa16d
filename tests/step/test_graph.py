"""Step programs of captured decoders: the simulator against the eager graph, bit for bit."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from decoders import SIZES
from gates.foreign import register
from gates.networks import networks
from hls.library import linear, reference
from passes.tiny import backend_of
from torch.fx import Node
from transformers import Qwen3Config, Qwen3ForCausalLM

from fastcar_compile.codegen.hls.accelerator import Accelerator, choose_accelerator, offloaded
from fastcar_compile.codegen.hls.decode_step import DecodeStep, decode_step
from fastcar_compile.codegen.hls.emit import linear_weights
from fastcar_compile.codegen.hls.step_program.cache_layout import LANES, Rows
from fastcar_compile.codegen.hls.step_program.program import StepProgram
from fastcar_compile.codegen.hls.step_program.replaying import Decide
from fastcar_compile.codegen.hls.step_program.simulator import Product, SimulatedMemory, StepSimulator
from fastcar_compile.config import CompileConfig, ReplayConfig, SparseAttention
from fastcar_compile.config.targets import load_target
from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.capture import capture
from fastcar_compile.ir.pass_manager import run_pipeline
from fastcar_compile.ir.program import DecoderProgram
from fastcar_compile.ir.query import node_named
from fastcar_compile.passes.pipeline import analysis_pipeline, rewrite_pipeline
from step.values import Array, assert_same

FRAME, LENGTH, BATCH = 8, 25, 2


@dataclass(frozen=True)
class Captured:
    """A rewritten decoder, and what the engine computes of it."""

    program: DecoderProgram
    plan: Accelerator

    def memory(self, program: StepProgram, streams: tuple[str, ...], constants: Array) -> SimulatedMemory:
        """Memory with empty caches; products by the place of their streams in a section."""
        places, at, sizes = dict[int, Product](), 0, program.sizes
        for name in streams:
            places[at] = self.product(name)
            words = self.plan.design.linears
            at += words[name].section_words if name in words else self.plan.design.section_words
        keys, values = (np.zeros((sizes.ports, n, LANES), np.int8) for n in (sizes.key_words, sizes.value_words))
        replay = np.zeros((sizes.replay_words, 4), np.uint32)
        return SimulatedMemory(constants, places, keys, values, replay, self.plan.table.to_bytes())

    def product(self, name: str) -> Product:
        """A linear call, or the MLP of layer_<l>, in numpy."""
        spec, calls = self.plan.design.mlp, {call.name: call for call in self.plan.calls}
        if name in calls:
            parts = linear_weights(self.program, calls[name].weights, calls[name].biases)
            return lambda x: np.concatenate([linear(x, part, spec) for part in parts], 1)
        site = self.program.sites[int(name.removeprefix("layer_"))]
        own = linear_weights(self.program, site.mlp.weights, site.mlp.biases)
        return lambda x: reference(x[:, : spec.hidden], own, spec)


SHAPE = {"tokens_per_frame": FRAME, "max_seq_len": LENGTH, "batch_size": BATCH}


def captured(model: torch.nn.Module) -> DecoderProgram:
    """The decode step of a model."""
    return run_pipeline(capture(model, prefill_chunk=16, **SHAPE), analysis_pipeline())


def compiled(program: DecoderProgram, **options: Any) -> Captured:
    """A decode step for a board, with exact numerics."""
    given = {"target": "zcu102", "kv": "int8", "numerics": "exact", "offload": "linears", "prefill_chunk": 1}
    config = CompileConfig(**{**SHAPE, **given, **options})
    run_pipeline(program, rewrite_pipeline(config, len(program.sites)))
    work = offloaded(program, config.offload)
    return Captured(program, choose_accelerator(program, config, load_target("zcu102"), work))


def form_of(made: Captured) -> DecodeStep:
    """What its decode step is made of."""
    return decode_step(made.program, made.plan.calls, made.plan.kept)


@pytest.fixture(scope="module")
def step() -> DecoderProgram:
    """A decoder whose q and k have norms."""
    torch.manual_seed(0)
    config = Qwen3Config(**{**SIZES, "head_dim": 32, "initializer_range": 0.2, "max_position_embeddings": LENGTH})
    return captured(Qwen3ForCausalLM(config).eval())


REPLAY = ReplayConfig(
    gate="learned", threshold=[None, 1.5], gate_weights=networks(SIZES["hidden_size"], 3, 5), refresh_every=3
)
"""A refresh, and a layer without a gate."""


@pytest.fixture
def ring(step: DecoderProgram) -> Captured:
    """With a ring of keys and values, and int4 weights."""
    sparse = SparseAttention(sinks=3, window=9)
    return compiled(copy.deepcopy(step), quant="w4a8", replay=REPLAY, sparse_attention=sparse)


def test_the_simulator_decides_as_the_eager_graph(ring: Captured) -> None:
    """Logits and decisions of every token of a sequence."""
    replayed = agreed(ring)
    assert 0.1 < np.mean(np.stack(replayed)[:, 1]) < 0.9
    assert [i.layer for i in found_decisions(ring)] == [1]


def found_decisions(made: Captured) -> list[Decide]:
    """The instructions that decide."""
    return [i for i in form_of(made).program(made.plan.design).instructions if isinstance(i, Decide)]


def agreed(made: Captured) -> list[Array]:
    """What replayed in every forward in which something decided; logits and decisions are held to the eager graph."""
    form = form_of(made)
    program = form.program(made.plan.design)
    memory = made.memory(program, form.streams, form.constants(made.program))
    simulator, eager = StepSimulator(program, memory), backend_of(made.program)
    embedding = made.program.params["model.embed_tokens.weight"].float().numpy()
    ids = np.random.default_rng(3).integers(0, SIZES["vocab_size"], (BATCH, LENGTH))
    thresholds = np.array([site.threshold or 0.0 for site in made.program.sites], np.float32)
    replayed = list[Array]()
    for t in range(LENGTH):
        want = eager.decode(ids[:, t : t + 1], t, t, thresholds)
        got = simulator.run(embedding[ids[:, t]], Rows.at(program.sizes, t, t))
        assert_same(got, np.ascontiguousarray(want.logits[:, 0]))
        if simulator.decided:
            every = np.ones(BATCH, bool)
            replayed.append(~np.stack([simulator.decided.get(site.layer, every) for site in made.program.sites]))
            np.testing.assert_array_equal(replayed[-1].reshape(-1), np.asarray(want.decisions).reshape(-1))
    return replayed


def test_what_a_step_program_cannot_express_is_refused(ring: Captured) -> None:
    """A multiplier of the residual."""
    program = copy.deepcopy(ring.program)
    graph, site = program.graph_module.graph, program.sites[1]
    residual = node_named(graph, site.residual)
    added = residual.args[1]
    assert isinstance(added, Node)
    with graph.inserting_before(residual):
        half = graph.call_function(torch.ops.aten.mul.Tensor, (added, 0.5))
    residual.replace_input_with(added, half)
    with pytest.raises(
        CompileError, match=rf"a step program has the sum of .* and the decode step has {residual.name}"
    ):
        form_of(replace(ring, program=program))


@pytest.mark.parametrize("gate", ["foreign", "random"])
def test_a_gate_of_the_host_is_refused(step: DecoderProgram, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    made = compiled(copy.deepcopy(step), quant="w8a8", replay=ReplayConfig(gate=gate))
    with pytest.raises(CompileError, match=f"the host decides gate '{gate}', and has no part in a step"):
        form_of(made)
