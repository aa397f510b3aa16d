"""Bad input: a clear error, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoders import PlainBlock, PlainDecoder, llama
from torch import Tensor

import fastcar_compile as fc


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    path = tmp_path_factory.mktemp("errors") / "a"
    return fc.compile(llama(), "cpu", tokens_per_frame=8, output=path)


class Unmatched(PlainBlock):
    """Two nonlinearities in a row."""

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(torch.nn.functional.gelu(self.up(x))))


class UnmatchedDecoder(PlainDecoder):
    block = Unmatched


def test_unmatched_mlps_are_listed_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(fc.CompileError) as error:
        fc.compile(UnmatchedDecoder(), "cpu", tokens_per_frame=8, output=tmp_path / "a")
    text = str(error.value)
    assert "2 problems were found" in text
    assert "layer 0: the MLP cannot be matched" in text
    assert "layer 1: the MLP cannot be matched" in text
    assert "blocks.1" in text
    assert "where: " in text
    assert not (tmp_path / "a").exists()


def test_tokens_per_frame_must_be_shorter_than_the_cache(tmp_path: Path) -> None:
    with pytest.raises(fc.CompileError, match=r"tokens_per_frame \(65\) is not smaller than max_seq_len \(65\)"):
        fc.compile(llama(), "cpu", tokens_per_frame=65, output=tmp_path / "a")


def test_unknown_target_names_the_nearest() -> None:
    with pytest.raises(fc.TargetError, match="zcu102"):
        fc.compile(llama(), "zcu103", tokens_per_frame=8)


def test_missing_tokens_per_frame_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="256 is assumed"):
        fc.compile(llama(max_position_embeddings=300), "cpu", output=tmp_path / "a", replay=None)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (torch.zeros(1, 4), "tokens are float32, expected int64"),
        (torch.zeros(2, 4, dtype=torch.int64), r"shape \[2, 4\], expected \[1, P\]"),
        (torch.zeros(1, 70, dtype=torch.int64), "70 tokens, but max_seq_len is 65"),
        (torch.full((1, 4), 17), "token 17 is outside the vocabulary of 17"),
    ],
)
def test_bad_prompts(artifact: fc.Artifact, ids: Tensor, text: str) -> None:
    with pytest.raises(fc.InputError, match=text):
        artifact.session("cpu").prefill(ids)


def test_unknown_backend(artifact: fc.Artifact) -> None:
    with pytest.raises(fc.BackendError, match="unknown backend 'gpu'"):
        artifact.session("gpu")


def test_tampered_file_is_refused_before_loading(tmp_path: Path) -> None:
    made = fc.compile(llama(), "cpu", tokens_per_frame=8, output=tmp_path / "a")
    library = next((made.path / "host").rglob("decode.so"))
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)
    (made.path / "graph" / "after.txt").unlink()
    with pytest.raises(fc.ArtifactError) as error:
        fc.load(made.path)
    assert "decode.so" in str(error.value)
    assert "after.txt" in str(error.value)


def test_explain_names_layers_and_nodes(artifact: fc.Artifact) -> None:
    text = artifact.explain()
    assert "layer 1: model.layers.1.mlp" in text
    assert "mlp_cache_1" in text
    assert "made by  insert-replay" in artifact.explain(node="cond")
    with pytest.raises(fc.InputError, match="no node 'nothing'"):
        artifact.explain(node="nothing")
