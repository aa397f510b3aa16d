"""Model -> artifact -> session, on every backend, against the original model."""

import gc

import pytest
import torch
from agreement import decode
from decoders import llama
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaForCausalLM

import fastcar_compile as fc
from fastcar_compile.artifact.explain import Described, Description
from fastcar_compile.ir.ops.operator import REASONS
from fastcar_compile.ir.query import tensor_attribute
from fastcar_compile.passes.insert_replay import InsertReplay

FRAME, LENGTH = 8, 65
BACKENDS = ("eager", "cpu", "onnxruntime")
WEIGHTS = list[StorageWeakRef]()
"""Of the models that `artifacts` compiled."""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fc.Artifact]:
    """The small Llama at batch 2, in float32 and w8a8."""
    folder = tmp_path_factory.mktemp("artifacts")

    def model() -> LlamaForCausalLM:
        made = llama()
        WEIGHTS.append(StorageWeakRef(made.lm_head.weight.untyped_storage()))
        return made

    return {
        quant: fc.compile(
            model(), target="cpu", tokens_per_frame=FRAME, max_seq_len=LENGTH, batch_size=2, quant=quant,
            replay=fc.ReplayConfig(threshold=0.0), prefill_chunk=1, output=folder / quant,
        )
        for quant in ("none", "w8a8")
    }  # fmt: skip


def test_artifacts_and_sessions_say_what_they_are(artifacts: dict[str, fc.Artifact]) -> None:
    artifact = artifacts["w8a8"]
    assert str(artifact) == "\n".join(
        [
            f"Artifact {artifact.path}",
            "  target   cpu",
            "  decoder  2 layers of 64, 8 tokens per frame, 65 positions, 2 rows",
            "  numbers  weights w8a8, KV cache float32, numerics native",
            "  gate     tas in 2 of 2 layers, threshold 0",
            f"  digest   {artifact.digest}",
        ]
    )
    session = artifact.session("eager")
    decode(session, tokens(length=24), 1)
    lines = str(session).splitlines()
    assert lines[:4] == ["Session", "  backend  eager", f"  artifact {artifact.path}", f"  digest   {artifact.digest}"]
    assert lines[-1] == f"  state    24 of 65 positions, {session.stats.replay_ratio:.1%} of the MLPs replayed"
    session.set_threshold([0.25, None])
    assert "  gate     tas in 1 of 2 layers, threshold 0.25\n" in str(session)
    session.close()
    assert str(session).startswith("Session, closed\n")
    assert "<th>gate</th><td>tas in 1 of 2 layers" in session._repr_html_()


def test_artifacts_do_not_keep_the_weights_of_their_models(artifacts: dict[str, fc.Artifact]) -> None:
    gc.collect()
    assert [weight.expired() for weight in WEIGHTS] == [True, True]
    ran, quantised = (artifacts[quant].original_graph for quant in ("none", "w8a8"))
    assert tensor_attribute(ran, "lm_head.weight").any()
    assert tensor_attribute(quantised, "lm_head.weight").is_meta


def test_what_files_say_cannot_write_to_a_terminal_or_a_page() -> None:
    class Named(Described):
        def _description(self) -> Description:
            return "A <b>", {"target": "x\x1b[2J<script>"}

    assert str(Named()) == "A <b>\n  target   'x\\x1b[2J<script>'"
    assert "<script>" not in Named()._repr_html_()
    assert "A &lt;b&gt;" in Named()._repr_html_()


def test_graphs_print_without_releases_of_memory(artifacts: dict[str, fc.Artifact]) -> None:
    for graph in (artifacts["w8a8"].graph, artifacts["w8a8"].original_graph, fc.load(artifacts["none"].path).graph):
        text = graph.print_readable(print_output=False)
        assert "torch.ops.aten.embedding.default(" in text
        assert "= None" not in text
        assert "No stacktrace" not in text
        assert "tokens = None" in graph.code, "the code that runs frees its values"


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 17, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("quant", ["none", "w8a8"])
def test_gate_on_decisions_and_logits_agree(artifacts: dict[str, fc.Artifact], quant: str) -> None:
    ids = tokens()
    eager, *others = (artifacts[quant].session(b, record=True) for b in BACKENDS)
    expected = decode(eager, ids, 1)
    assert 0.0 < eager.stats.replay_ratio < 0.8
    for session in others:
        actual = decode(session, ids, 1)
        assert (eager.stats.decisions == session.stats.decisions).all()
        torch.testing.assert_close(actual, expected, atol=1e-4 if quant == "none" else 1e-2, rtol=0)


def test_explain_names_layers_and_nodes(artifacts: dict[str, fc.Artifact]) -> None:
    artifact = artifacts["none"]
    text = artifact.explain()
    assert "layer 1: model.layers.1.mlp" in text
    assert "mlp_cache_1" in text
    assert "made by  insert-replay" in artifact.explain(node="cond")
    assert f"reason   {REASONS['cond']} {InsertReplay.reason}" in artifact.explain(node="cond")
    with pytest.raises(fc.InputError, match="no node 'nothing'"):
        artifact.explain(node="nothing")
