"""The C++ host program for the board's CPU, under qemu-user, against the session on this machine."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from trust.conftest import Keys

import fastcar_compile as fc
from board.conftest import CHUNK, LENGTH, Machine
from fastcar_compile.artifact.thresholds import Thresholds

EM_AARCH64 = 183


@pytest.fixture(scope="module")
def program(artifact: fc.Artifact, aarch64: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fastcar_decode for aarch64."""
    folder = tmp_path_factory.mktemp("decode")
    built = aarch64.build(artifact.path, folder, "decode")
    assert built.returncode == 0, built.stderr
    return folder / "fastcar_decode"


def elf_machine(path: Path) -> int:
    """e_machine of an ELF file."""
    head = path.read_bytes()[:20]
    assert head[:4] == b"\x7fELF"
    return struct.unpack_from("<H", head, 18)[0]


def test_the_artifact_has_a_library_for_the_board(artifact: fc.Artifact) -> None:
    board = artifact.manifest.host.board
    assert board is not None
    assert (board.triple, board.cpu, board.linked) == ("aarch64-linux-gnu", "cortex-a53", True)
    assert board.compiler == "aarch64-linux-gnu-g++"
    assert sorted(board.programs.named()) == ["decode", "draw", "offload", "prefill"]
    assert board.programs.library == "host/aarch64-linux-gnu/decoder.so"
    assert elf_machine(artifact.path / board.programs.library) == EM_AARCH64
    assert board.programs.named() == artifact.manifest.host.variants[0].programs.named()


@pytest.mark.parametrize(("length", "count"), [(1, 50), (CHUNK + 5, 40)], ids=["one token", "longer than a chunk"])
def test_tokens_equal_those_of_the_session_here(
    artifact: fc.Artifact, aarch64: Machine, program: Path, length: int, count: int
) -> None:
    prompt = torch.randint(0, 17, (2, length), generator=torch.Generator().manual_seed(length))
    session = artifact.session("cpu")
    expected = session.generate(prompt, count)
    assert len(set(expected.flatten().tolist())) > 4
    assert 0.0 < session.stats.replay_ratio < 1.0
    rows = [w for row in prompt.tolist() for w in ("--prompt", ",".join(map(str, row)))]
    done = aarch64.run(program, artifact.path, *rows, "--num-tokens", count)
    assert done.returncode == 0, done.stderr
    assert [list(map(int, line.split())) for line in done.stdout.splitlines()] == expected.tolist()
    assert done.stderr == f"replay ratio {session.stats.replay_ratio:.4f}\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--prompt", "16,x"), "--prompt is `x`"),
        (("--prompt", "17"), "token 17 is outside the vocabulary of 17\n  hint:  use ids 0 .. 16"),
        (("--prompt", "1", "--prompt", "2,3"), "the rows of the prompt have different lengths"),
        (("--prompt", "1", "--prompt", "2", "--prompt", "3"), "the prompt has 3 row(s)\n  hint:  give 2 of one length"),
        (("--prompt", "1", "--num-tokens", LENGTH + 1), "1 prompt token and 66 new ones do not fit max_seq_len 65"),
        (("--prompt", "1", "--speed", "2"), "`--speed` is not understood\n  hint:  fastcar_decode ARTIFACT --prompt"),
        (("--num-tokens", "2"), "an artifact and a prompt are needed"),
        (
            ("--prompt", "1", "--temperature", "hot"),
            "no token can be drawn at temperature `hot`, top_k 0, seed 0\n  hint:",
        ),
        (
            ("--prompt", "1", "--top-k", "3"),
            "no token can be drawn at temperature `0`, top_k 3, seed 0\n  hint:  give a",
        ),
        (("--prompt", "1", "--jacobi", "2"), "--jacobi is 2\n  hint:  give 1 to 1 positions"),
    ],
)
def test_bad_input_is_told(
    artifact: fc.Artifact, aarch64: Machine, program: Path, words: tuple[object, ...], text: str
) -> None:
    done = aarch64.run(program, artifact.path, *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {text}")
    assert done.stdout == ""


def test_missing_files_are_named(artifact: fc.Artifact, aarch64: Machine, program: Path, tmp_path: Path) -> None:
    def refused(text: str, file: str) -> None:
        done = aarch64.run(program, tmp_path / "a", "--prompt", "1")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {text}"), done.stderr
        assert f"\n  where: {tmp_path}/a{file}\n  hint:  " in done.stderr

    refused("the artifact cannot be opened: No such file or directory", "")
    (tmp_path / "a").mkdir()
    refused("the file cannot be opened: No such file or directory", "/manifest.json")
    shutil.copy(artifact.path / "manifest.json", tmp_path / "a")
    refused("the file cannot be opened: No such file or directory", "/weights/model.safetensors")
    (tmp_path / "a" / "weights").symlink_to(artifact.path / "weights")
    refused("the file is a symbolic link", "/weights/model.safetensors")
    (tmp_path / "a" / "weights").unlink()
    shutil.copytree(artifact.path / "weights", tmp_path / "a" / "weights")
    refused("the file cannot be opened: No such file or directory", "/host/aarch64-linux-gnu/decoder.so")
    manifest = (artifact.path / "manifest.json").read_bytes()
    (tmp_path / "a" / "manifest.json").write_bytes(manifest.replace(b'"python": "3', b'"python": "2'))
    refused("the manifest is damaged: its checksum is not that of its content", "/manifest.json")
    (tmp_path / "a" / "manifest.json").write_text('{"schema_version": 3, "files": {}}')
    refused("the artifact has schema version 3, this program reads version", "/manifest.json")


def test_stored_thresholds_are_said_to_be_unused(
    artifact: fc.Artifact, aarch64: Machine, program: Path, tmp_path: Path
) -> None:
    shutil.copytree(artifact.path, tmp_path / "copy")
    copy = fc.load(tmp_path / "copy")
    gate, none = copy.manifest.layers.gate, (0.0,) * copy.manifest.decoder.config.num_layers
    assert gate is not None
    facts = {"replay": 0.0, "per_layer": none, "nll": 1.0, "nll_dense": 1.0, "goal": "none", "inputs": ""}
    copy.store_thresholds(Thresholds(gate=gate, values=none, **facts))
    rows = ("--prompt", "1", "--prompt", "2", "--num-tokens", "2")
    done = aarch64.run(program, copy.path, *rows)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("the artifact's stored thresholds are not used here")
    assert "stored thresholds" not in aarch64.run(program, artifact.path, *rows).stderr


def test_a_pinned_digest_and_a_key_hold_on_the_board(
    artifact: fc.Artifact, aarch64: Machine, program: Path, keys: Keys, tmp_path: Path
) -> None:
    shutil.copytree(artifact.path, tmp_path / "a")
    words = (program, tmp_path / "a", "--prompt", "1", "--num-tokens", 2)
    assert aarch64.run(*words, "--digest", artifact.digest).returncode == 0
    fc.sign(tmp_path / "a", keys.private)
    assert aarch64.run(*words, "--public-key", keys.public, "--digest", artifact.digest).returncode == 0
    done = aarch64.run(*words, "--public-key", keys.other_public)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the artifact is signed with another key than the one required, sha256:")


@pytest.mark.parametrize(
    ("name", "header", "package"),
    [("digest", "openssl/opensslconf.h", "libssl-dev"), ("json", "nlohmann/json.hpp", "nlohmann-json3-dev")],
)
def test_a_missing_header_is_named(
    artifact: fc.Artifact, native: Machine, tmp_path: Path, name: str, header: str, package: str
) -> None:
    source = artifact.path / "host" / "src" / f"fastcar_{name}.hpp"
    command = [native.compiler, "-std=c++17", "-nostdinc", f"-I{tmp_path}", "-E", "-x", "c++", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    message = next(line for line in done.stderr.splitlines() if f"{header} is missing" in line)
    assert f"(Debian: {package})" in message


def test_make_asks_for_tvm(artifact: fc.Artifact, tmp_path: Path, native: Machine) -> None:
    done = native.build(artifact.path, tmp_path / "build", "decode", FFI=str(tmp_path))
    assert done.returncode == 2
    assert "set TVM and FFI to the folders of the Python packages tvm and tvm_ffi" in done.stderr
    assert not (tmp_path / "build").exists()


def test_the_library_uses_no_instruction_beyond_the_cpu(artifact: fc.Artifact) -> None:
    """Cortex-A53 is Armv8.0-A: no dot product, no half-precision arithmetic, no SVE, no LSE atomics."""
    command = ["aarch64-linux-gnu-objdump", "-d", artifact.path / "host/aarch64-linux-gnu/decoder.so"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {fields[2].split()[0] for line in text.splitlines() if len(fields := line.split("\t")) > 2}
    assert {"fmla", "smull", "ldr"} <= used
    assert used.isdisjoint({"sdot", "udot", "ldadd", "cas", "whilelo", "ptrue", "fcvtzs.h"})
