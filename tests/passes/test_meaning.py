"""What the passes must not change: results, and where every node comes from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from fastcar_compile.errors import CompileError
from fastcar_compile.ir import DecoderProgram, module_path_of, source_of
from fastcar_compile.passes.insert_replay import InsertReplay

from .programs import FRAME, STAGES, gated, plain, run, up_to

BUILDERS = pytest.mark.parametrize("build", [plain, gated])


def decode(program: DecoderProgram, steps: int = 10) -> torch.Tensor:
    """Logits [steps, V] of a fixed token sequence, every row computed."""
    state: dict[str, torch.Tensor] = {}
    logits = []
    for t in range(steps):
        values = {
            "tokens": torch.tensor([[3 * t % 11]]),
            "position": torch.tensor([t]),
            "step": torch.tensor([t]),
            "thresholds": torch.tensor([torch.inf]),
        }
        results = run(program.graph_module, program, state | values)
        logits.append(results["logits"][0, 0])
        state = {n: results[n] for n in program.state_names()}
    return torch.stack(logits)


@BUILDERS
def test_rewrite_without_replay_keeps_the_results(build: Callable[[], DecoderProgram]) -> None:
    reference = decode(up_to(build(), "canonicalize", inclusive=False))
    program = up_to(build(), "find-sites", inclusive=True)
    torch.testing.assert_close(decode(program), reference, atol=0, rtol=0)
    InsertReplay(thresholds=(1.0,)).apply(program)
    program.graph_module.recompile()
    torch.testing.assert_close(decode(program), reference, atol=0, rtol=0)


@BUILDERS
def test_w8a8_stays_near(build: Callable[[], DecoderProgram]) -> None:
    reference = decode(up_to(build(), "find-sites", inclusive=True))
    quantized = decode(up_to(build(), "quantize-w8a8", inclusive=True))
    assert 0 < (quantized - reference).abs().max() < 0.05 * reference.abs().max()


@BUILDERS
@pytest.mark.parametrize("stage", STAGES)
def test_every_computed_node_says_where_it_comes_from(build: Callable[[], DecoderProgram], stage: str) -> None:
    program = up_to(build(), stage, inclusive=True)
    modules = [m for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    nodes = [n for m in modules for n in m.graph.nodes if n.op == "call_function"]
    assert nodes
    assert [n.name for n in nodes if not source_of(n)] == []
    assert [n.name for n in nodes if str(n.target).startswith("fastcar.") and "made_by" not in n.meta] == []
    if stage in ("insert-replay", "offload-mlp"):
        (tas,) = [n for n in nodes if n.target == torch.ops.fastcar.tas.default]
        assert tas.meta["made_by"] == "insert-replay"
        assert module_path_of(tas)


def test_replay_inputs_and_outputs() -> None:
    program = up_to(plain(), "insert-replay", inclusive=True)
    caches = {"key_cache_0", "value_cache_0", "mlp_cache_0", "chain_count_0"}
    assert set(program.inputs) == {"tokens", "position", "step", "thresholds", *caches}
    assert program.outputs[:3] == ["logits", "decisions", "scores"]
    shapes = {s.name: (s.shape, s.dtype) for s in program.state}
    assert shapes["mlp_cache_0"] == ((FRAME, 1, 32), torch.float32)
    assert shapes["chain_count_0"] == ((FRAME, 1), torch.int32)


def test_thresholds_must_fit_the_layers() -> None:
    program = up_to(plain(), "find-sites", inclusive=True)
    with pytest.raises(CompileError, match="2 thresholds for 1 layers"):
        InsertReplay(thresholds=(1.0, 2.0)).apply(program)


def test_coupling_needs_pairs() -> None:
    program = up_to(plain(), "find-sites", inclusive=True)
    with pytest.raises(CompileError, match=r"couple_cfg pairs row b with row b \+ B / 2, but batch_size is 1"):
        InsertReplay(thresholds=(1.0,), couple_cfg=True).apply(program)


def test_a_layer_without_threshold_gets_no_cache() -> None:
    program = up_to(plain(), "find-sites", inclusive=True)
    assert InsertReplay(thresholds=(None,)).apply(program) is True  # decisions and scores are outputs all the same
    assert [s.name for s in program.state] == ["key_cache_0", "value_cache_0"]
    program.graph_module.recompile()
    assert not run(program.graph_module, program, {"step": torch.tensor([9])})["decisions"].any()
