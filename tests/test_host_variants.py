"""One artifact with libraries for several instruction sets."""

import re
from pathlib import Path

import pytest
import torch
from decoders import llama

import fastcar_compile as fc
from fastcar_compile.artifact.sections import ProgramsPart
from fastcar_compile.cli.inspect import host_lines
from fastcar_compile.codegen.tvm import isa
from fastcar_compile.codegen.tvm.isa import host_instruction_set, instruction_set
from fastcar_compile.runtime.backends import cpu
from fastcar_compile.support.machine import cpu_flags


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    """A small w4a8 Llama for the machine's best instruction set and the least of x86-64, named in another order."""
    if host_instruction_set().machine != "x86_64":
        pytest.skip("the instruction sets of this test are x86-64's")
    return fc.compile(
        llama(num_hidden_layers=1, initializer_range=0.2), target="cpu", tokens_per_frame=4, max_seq_len=24,
        quant="w4a8", prefill_chunk=1, host_cpus=["sse4", "native", "sse4"],
        output=tmp_path_factory.mktemp("variants") / "artifact",
    )  # fmt: skip


def test_the_manifest_lists_them_best_first(artifact: fc.Artifact) -> None:
    variants = artifact.manifest.host.variants
    best = host_instruction_set().name
    assert [v.instruction_set for v in variants] == [best, "sse4"]
    assert variants[1].flags == tuple(sorted(instruction_set("sse4").flags))
    for variant in variants:
        folder = f"host/x86_64-linux-gnu/{variant.instruction_set}"
        assert variant.programs.library == f"{folder}/decoder.so"
        assert list(variant.programs.named()) == ["decode", "draw"]
    assert host_lines(artifact.manifest.host) == [f"{best} (x86_64-linux-gnu)", "sse4 (x86_64-linux-gnu)"]


def test_a_session_picks_the_best_that_the_cpu_runs(artifact: fc.Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both give the same tokens; without the better one's files the session on the lesser CPU still opens."""
    prompt = torch.tensor([[1, 2, 3, 4, 5]])
    expected = artifact.session("cpu").generate(prompt, 16)
    chosen: list[str] = []
    pick = cpu.programs_for

    def spy(*arguments: object) -> ProgramsPart:
        programs = pick(*arguments)  # pyright: ignore[reportArgumentType]
        chosen.append(programs.library)
        return programs

    monkeypatch.setattr(cpu, "programs_for", spy)
    artifact.session("cpu")
    monkeypatch.setattr(cpu, "cpu_flags", lambda: instruction_set("sse4").flags)
    assert torch.equal(torch.as_tensor(artifact.session("cpu").generate(prompt, 16)), torch.as_tensor(expected))
    names = [Path(library).parent.name for library in chosen]
    assert names == [host_instruction_set().name, "sse4"]


def test_a_cpu_that_runs_none_of_them(artifact: fc.Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_flags", frozenset)
    best, triple = host_instruction_set().name, "x86_64-linux-gnu"
    text = f"no library for this CPU ({triple}), only for {best} ({triple}), sse4 ({triple})"
    with pytest.raises(fc.BackendError, match=re.escape(text)):
        artifact.session("cpu")


@pytest.mark.parametrize(
    ("beyond", "best"),
    [
        (set(), "avx512-vnni"),
        ({"avx512_bf16"}, "avx512-bf16"),
        ({"avx512_bf16", "avx512_fp16"}, "avx512-vnni"),
        ({"avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"}, "avx512-amx"),
    ],
)
def test_native_has_more_instructions_where_they_are_faster(
    beyond: set[str], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 on AMD's CPUs by vdpbf16ps, on Intel's by tiles, as int8; others take the set that most CPUs run."""
    monkeypatch.setattr(isa.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(isa, "cpu_flags", lambda: isa.instruction_set("avx512-vnni").flags | beyond)
    assert isa.host_instruction_set("bf16").name == best
    assert isa.host_instruction_set("w8a8").name == (best if best == "avx512-amx" else "avx512-vnni")
    assert isa.host_instruction_set("w4a8").name == "avx512-vnni"


def test_kernels_of_both_variants_differ(artifact: fc.Artifact) -> None:
    libraries = [v.programs.library for v in artifact.manifest.host.variants]
    assert len({artifact.manifest.files[library].sha256 for library in libraries}) == 2
    assert cpu_flags() >= host_instruction_set().flags
