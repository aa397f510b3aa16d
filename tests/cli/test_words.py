"""Options without effect, and errors in the words of the command line."""

from pathlib import Path

import pytest
from decoders import llama

import fastcar_compile as fc
from fastcar_compile.cli.common import CommandCall, in_words_of
from fastcar_compile.codegen.hls.model.shapes import load_shape
from fastcar_compile.codegen.tvm.isa import instruction_set
from fastcar_compile.errors import CompileError, InputError, UserError

from .conftest import Fastcar, refused


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a tiny Llama; a dry run needs no more."""
    folder = tmp_path_factory.mktemp("words")
    llama(num_hidden_layers=1, hidden_size=16, intermediate_size=32).save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "compile m -o o --no-replay --gate random --threshold 3 --max-chain 3 --draft /nope",
            "--gate and --threshold and --draft and --max-chain have no effect with --no-replay",
        ),
        ("compile m -o o --no-replay --couple-cfg", "--couple-cfg has no effect with --no-replay"),
        ("compile m -o o --window-positions cache", "--window-positions needs --window"),
        ("compile m -o o --no-cache --cache-libraries", "--cache-libraries needs --cache"),
        ("run x --prompt 1 --seed 0 --top-k 3 --exact", "--seed and --top-k and --exact need --temperature"),
        ("run x --prompt 1 --context-mask m.npy", "--context-mask needs --context"),
        ("calibrate x --videos v.npy --drop-signature", "--drop-signature needs --store"),
        ("calibrate x --videos v.npy --executor processes:2", "the threads of this machine compute"),
        ("train-gate x --videos v.npy --target-replay 0.5 -o g --gate tas --units 8", "--units needs --gate learned"),
        ("fit-draft x --videos v.npy -o d --distill-rate 0.1", "--distill-rate needs --distill-steps"),
        ("evaluate x --videos v.npy --cases c --ratios 0.5 --gates tas", "have no effect with --cases"),
        ("inspect x --trace t.npy", "--trace needs --html"),
        ("opt x --print-after-all", "--print-after-all needs --passes"),
    ],
)
def test_an_option_without_effect_is_refused_by_name(fastcar: Fastcar, words: str, text: str) -> None:
    refused(fastcar(*words.split()), text)


def test_an_option_without_effect_is_refused_in_python(llama_folder: Path) -> None:
    for options, text in (
        ({"max_chain": 3}, "max_chain without effect: threshold None"),
        ({"refresh_every": 3, "couple_cfg": True}, "couple_cfg and refresh_every without effect"),
        ({"max_chain": 3, "threshold": [None, None]}, "max_chain without effect: threshold None"),
        ({"refresh_every": 3, "gate": "never", "threshold": 0.5}, "refresh_every without effect: gate never"),
    ):
        replay = fc.ReplayConfig(**{"threshold": None} | options)
        with pytest.raises(CompileError, match=text):
            fc.compile(llama_folder, tokens_per_frame=4, dry_run=True, replay=replay)
    with pytest.raises(InputError, match="but at temperature 0 nothing is drawn"):
        fc.Sampling(temperature=0, top_k=3, top_p=0.5)


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ("--quant w8a9", ["--quant: unknown quantisation 'w8a9'", "did you mean 'w8a8'?", "where: --quant"]),
        ("--gate inputdelta", ["--gate: unknown gate 'inputdelta'", "did you mean 'input_delta'?"]),
        ("--kv flaot16", ["--kv: unknown KV type 'flaot16'", "did you mean 'float16'?"]),
        ("--target zcu1022", ["unknown target 'zcu1022'", "did you mean 'zcu102'?"]),
        ("--host-cpus avx3", ["unknown instruction set 'avx3'", "did you mean 'avx2'?", "where: --host-cpus"]),
        ("--offload liners --target zcu102", ["--offload: Input should be", "did you mean 'linears'?"]),
        ("--offload mlp", ["--offload mlp needs an accelerator, and target cpu has none", "leave --offload out"]),
        ("--engine hls", ["--engine hls needs an accelerator"]),
        ("--numerics exact", ["--numerics exact is defined for integers, not for --quant none and --kv float32"]),
        ("--grid 3x3", ["the option --grid was removed", "use --jacobi 8"]),
        ("--batch-size 0", ["--batch-size: Input should be"]),
        ("--batsh-size 2", ["no such option: --batsh-size", "--batch-size"]),
    ],
)
def test_an_error_names_the_option_of_the_command(
    fastcar: Fastcar, llama_folder: Path, words: str, texts: list[str]
) -> None:
    result = fastcar("compile", llama_folder, "--dry-run", "--tokens-per-frame", "4", *words.split())
    refused(result, *texts)
    assert "CompileConfig" not in result.stderr
    assert "ReplayConfig" not in result.stderr


def test_other_words_stay() -> None:
    """Of a manifest's fields, of text in quotes and of values."""
    call = CommandCall({"top_k": "--top-k", "max_seq_len": "--max-seq-len", "artifact": "artifact"})
    kept = "decoder.max_seq_len: 3; `top_k` of 'top_k'; the artifact is damaged"
    assert in_words_of(call, UserError(kept, where="a/top_k.py")).what == kept
    error = in_words_of(call, CompileError("top_k (3) is more than max_seq_len", hint="give top_k=None"))
    assert (error.what, error.hint) == ("--top-k (3) is more than --max-seq-len", "give --top-k None")
    assert isinstance(error, CompileError)


def test_python_is_told_what_was_meant() -> None:
    with pytest.raises(CompileError, match=r"treshold: Extra inputs are not permitted.*; did you mean 'threshold'"):
        fc.ReplayConfig(treshold=1)
    with pytest.raises(CompileError, match="did you mean 'tas'"):
        fc.ReplayConfig(gate="tass")
    with pytest.raises(UserError, match="did you mean 'llama2-7b'"):
        load_shape("lama2-7b")
    with pytest.raises(CompileError, match="did you mean 'neon'"):
        instruction_set("noen")
