"""Folders whose weights are in several places, or tied in several ways: the values are those of `from_pretrained`."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decoders import llama
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fastcar_compile.errors import CompileError
from fastcar_compile.frontend.capture import capture
from fastcar_compile.frontend.checkpoint import Checkpoint

HEAD, TABLE, SINGLE = "lm_head.weight", "model.embed_tokens.weight", "model.safetensors"
Weights = dict[str, Tensor]


def weights(seed: int = 0, tied: bool = False) -> Weights:
    return {n: t.clone() for n, t in llama(seed, num_hidden_layers=1, tie_word_embeddings=tied).state_dict().items()}


def shards(folder: Path, tensors: Weights, count: int = 2, *, index: bool = True) -> dict[str, str]:
    files = {n: f"model-{i * count // len(tensors) + 1:05d}-of-{count:05d}.safetensors" for i, n in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    if index:
        (folder / f"{SINGLE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


def folder_of(folder: Path, tied: bool = False, **changes: object) -> Path:
    """A folder with a config and without weights."""
    config = llama(num_hidden_layers=1, tie_word_embeddings=tied).config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def check(folder: Path, aside: str = "", expected: Weights | None = None) -> None:
    """Transformers' values (or those expected, where it reads none), and a warning of what is left aside."""
    from transformers import LlamaForCausalLM

    expected = expected or LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint = Checkpoint(folder)
    for name, value in expected.items():
        assert torch.equal(checkpoint.read(name), value), name
    said = [str(w.message).partition("left aside: ")[2] for w in caught if "left aside" in str(w.message)]
    assert said == [aside] * bool(aside)


OLD = "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors, model.safetensors.index.json"


def single_beside_shards(folder: Path) -> str:
    shards(folder, weights(1))
    save_file(weights(), folder / SINGLE)
    return OLD


def single_beside_an_index_without_shards(folder: Path) -> str:
    (folder / f"{SINGLE}.index.json").write_text("[")
    save_file(weights(), folder / SINGLE)
    return f"{SINGLE}.index.json"


def shards_beside_a_stray(folder: Path) -> str:
    shards(folder, weights(), 3)
    save_file(weights(1), folder / "model-00001-of-00002.safetensors")
    torch.save(weights(1), folder / "pytorch_model.bin")
    return "model-00001-of-00002.safetensors, pytorch_model.bin"


def a_tensor_in_two_shards(folder: Path) -> str:
    """The last file counts, whatever the index says."""
    files = shards(folder, weights())
    first = next(iter(files))
    last = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(last) | {first: weights(1)[first]}, last)
    return ""


def a_tensor_with_two_prefixes(folder: Path) -> str:
    save_file(weights(1) | {n.removeprefix("model."): t for n, t in weights().items()}, folder / SINGLE)
    return ""


@pytest.mark.parametrize(
    "arrange",
    [
        single_beside_shards, single_beside_an_index_without_shards, shards_beside_a_stray, a_tensor_in_two_shards,
        a_tensor_with_two_prefixes,
    ],
)  # fmt: skip
def test_the_files_are_those_of_transformers(tmp_path: Path, arrange: Callable[[Path], str]) -> None:
    check(folder_of(tmp_path), arrange(tmp_path))


def test_a_file_that_the_config_states_comes_first(tmp_path: Path) -> None:
    folder_of(tmp_path, transformers_weights="other.safetensors")
    save_file(weights(1), tmp_path / SINGLE)
    save_file(weights(), tmp_path / "other.safetensors")
    check(tmp_path, SINGLE)
    (tmp_path / SINGLE).unlink()
    folder_of(tmp_path, transformers_weights="../other.safetensors")
    with pytest.raises(CompileError, match=r"transformers_weights = '\.\./other\.safetensors'"):
        Checkpoint(tmp_path)


def test_a_whole_set_of_shards_needs_no_index(tmp_path: Path) -> None:
    """Transformers refuses the folder; a stray file does not win, and two sets are not mixed."""
    shards(folder_of(tmp_path), weights(), 3, index=False)
    save_file(weights(1), tmp_path / "optimizer.safetensors")
    save_file(weights(1), tmp_path / "model-00002-of-00002.safetensors")
    check(tmp_path, "model-00002-of-00002.safetensors, optimizer.safetensors", weights())
    shards(tmp_path, weights(1), 2, index=False)
    with pytest.raises(
        CompileError, match=r"00002\.safetensors and in model-.*00003\.safetensors, and there is no index"
    ):
        Checkpoint(tmp_path)


def test_files_of_unknown_order_are_not_mixed(tmp_path: Path) -> None:
    folder_of(tmp_path)
    for seed, name in enumerate(("a.safetensors", "b.safetensors")):
        save_file(weights(seed), tmp_path / name)
    with pytest.raises(CompileError, match=r"is in a\.safetensors and in b\.safetensors, and there is no index"):
        Checkpoint(tmp_path)
    torch.save(weights(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CompileError, match=r"the weights are in pytorch_model\.bin \(pickled weights are not read\)"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("given", ["head", "table", "both", "equal", "bfloat16"])
def test_parameters_are_tied_where_transformers_ties_them(tmp_path: Path, given: str) -> None:
    """Values of both that differ are kept, whatever the config says."""
    tensors = weights(tied=True) | {"both": {HEAD: torch.randn(17, 64)}}.get(given, {})
    if given == "bfloat16":
        tensors |= {TABLE: tensors[TABLE].bfloat16().float(), HEAD: tensors[TABLE].bfloat16()}
    dropped = {"head": TABLE, "table": HEAD}.get(given)
    save_file({n: t.clone() for n, t in tensors.items() if n != dropped}, folder_of(tmp_path, tied=True) / SINGLE)
    check(tmp_path)
    model = Checkpoint(tmp_path).model()
    assert isinstance(model.lm_head, nn.Linear)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (given != "both")
    program = capture(Checkpoint(tmp_path), batch_size=1, max_seq_len=8, tokens_per_frame=4, prefill_chunk=1)
    assert len({HEAD, TABLE} & set(program.params)) == 1 + (given == "both")
