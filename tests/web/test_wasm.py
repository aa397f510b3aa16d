"""A decoder for WebAssembly has the bits of the same artifact on this machine's CPU."""

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import check_tool

import fastcar_compile as fc
from fastcar_compile.codegen.tvm import emit
from fastcar_compile.errors import CompileError
from fastcar_compile.ir.draws import Noise
from fastcar_compile.runtime.sampling import Sampling

from .conftest import CHUNK, LENGTH, Node, compiled

PROMPT = CHUNK + 5  # a whole chunk and a padded one
GENERATOR = np.random.default_rng(3)
TOKENS = GENERATOR.integers(0, 17, LENGTH).tolist()


def native(artifact: fc.Artifact, threshold: float | str | None) -> dict[str, Any]:
    """What session.mjs says of one game, of the backend `cpu`."""
    session = artifact.session("cpu", threads=1, record=True)
    if not isinstance(threshold, str):
        session.set_threshold(threshold)
    logits = [session.prefill(np.array([TOKENS[:PROMPT]]))]
    logits += [session.step(np.array([token])) for token in TOKENS[PROMPT:]]
    decisions = np.asarray(session.stats.decisions)[..., 0].astype(int)
    return {
        "logits": [np.ascontiguousarray(row).tobytes().hex() for row in logits],
        "decisions": decisions.tolist(),
        "ratio": pytest.approx(float(decisions.mean())),
    }


def test_logits_and_decisions_have_the_same_bits(artifact: fc.Artifact, node: Node) -> None:
    """With the compiled threshold, with others, and dense, in turns."""
    thresholds = ["compiled", None, 0.9]
    found = node(artifact.path, prompt=TOKENS[:PROMPT], tokens=TOKENS[PROMPT:], thresholds=thresholds)
    assert found["games"] == [native(artifact, threshold) for threshold in thresholds]
    assert found["games"][1]["ratio"] == 0
    assert 0.1 < found["games"][0]["ratio"] < 0.9


def test_draws_are_those_of_python(artifact: fc.Artifact, node: Node) -> None:
    """Among all and among few tokens, at low and high temperature, with seeds of one word and of five."""
    cases = [(1.0, 0, 0), (0.7, 40, 1), (2.5, 3, 2**33 + 1), (0.01, 900, 2**53 - 1), (0.0, 0, 4)]
    logits = (8 * GENERATOR.standard_normal((12, 1000))).astype(np.float32)
    logits[:, 500:] = logits[:, :500]  # ties
    draws = [
        {"options": {"temperature": t, "topK": k, "seed": seed}, "logits": logits.tolist()} for t, k, seed in cases
    ]
    chosen = [Sampling(t, k or None, seed=seed, exact=True).start(np.zeros((1, 0), int)) for t, k, seed in cases]
    found = node(artifact.path, draws=draws)
    assert found["drawn"] == [[int(c(row[None], i)[0]) for i, row in enumerate(logits)] for c in chosen]


def test_noise_is_that_of_python(artifact: fc.Artifact, node: Node) -> None:
    """Over seeds of one and of two words, positions, and numbers of tokens that four does not divide."""
    cases = [(0, 0, 5), (1, 7, 1000), (2**32 - 1, 2**31, 3), (2**33 + 1, 16399, 205), (2**53 - 1, 2**32 - 1, 50003)]
    expected = [Noise(seed, 1, count)(position).tobytes().hex() for seed, position, count in cases]
    assert node(artifact.path, noises=cases)["noises"] == expected


def test_draws_from_logits_that_are_not_finite() -> None:
    """As Python's exact draws take them, with and without a limit, and greedy."""
    inf, nan = np.inf, np.nan
    rows = [[-inf, 1.5, -inf, 1.0], [0.0, inf, 3.0, inf], [nan, 0, 1, 2], [0, 1, 2, nan], [-inf] * 4]
    text = json.dumps(rows)  # with NaN and Infinity, which are no JSON but JavaScript
    script = f"""import {{ Sampler }} from "{files("fastcar_compile.runtime.web") / "fastcar.mjs"}";
        for (const options of [{{}}, {{ topK: 3 }}, {{ temperature: 0 }}]) {{
          const sampler = new Sampler({{ seed: 5, ...options }});
          for (const [row, position] of {text}.flatMap((row) => [0, 1, 2].map((position) => [row, position]))) {{
            const logits = Float32Array.from(row);
            try {{ console.log(sampler.choose(logits, position)); }} catch (e) {{ console.log(String(e)); }}
          }}
        }}"""
    command = [check_tool("node"), "--input-type=module", "-e", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    expected = list[str]()
    for sampling in (Sampling(seed=5), Sampling(top_k=3, seed=5), Sampling(0.0, seed=5)):
        choose = sampling.start(np.zeros((1, 0), int))
        expected += [str(int(choose(np.array([row], np.float32), i)[0])) for row in rows[:2] for i in range(3)]
        refused = ("logit 0 is NaN", "logit 3 is NaN", "all logits are -Infinity")
        expected += [f"RangeError: {text}" for text in refused for _ in range(3)]
    assert found == expected
    assert {"0", "2"} & set(found[:6]) == set()


@pytest.mark.parametrize("name", ["weights/model.safetensors", "decoder.wasm"])
def test_a_damaged_file_is_refused(artifact: fc.Artifact, node: Node, tmp_path: Path, name: str) -> None:
    shutil.copytree(artifact.path, tmp_path / "copy")
    (file,) = (tmp_path / "copy").rglob(Path(name).name)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = node(tmp_path / "copy")["error"]
    assert found.startswith("ArtifactError: ")
    assert f"{name} is not the file that manifest.json lists" in found


def test_without_the_linker_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is lowered."""
    monkeypatch.setattr(emit, "cross_compiler", lambda *_: "no-such-zig")
    with pytest.raises(CompileError, match="no library for wasm-simd128 can be linked") as found:
        compiled(tmp_path / "artifact", host_cpus=["wasm-simd128"])
    assert found.value.hint == 'pip install "fastcar_compile[wasm]"'


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"quant": "w4a8"}, {"replay": fc.ReplayConfig(threshold=0.0)}])
def test_other_exact_decoders(tmp_path: Path, node: Node, options: dict[str, Any]) -> None:
    artifact = compiled(tmp_path / "artifact", **options)
    found = node(artifact.path, prompt=TOKENS[:PROMPT], tokens=TOKENS[PROMPT:], thresholds=["compiled"])
    assert found["games"] == [native(artifact, "compiled")]


@pytest.mark.thorough
@pytest.mark.parametrize("quant", ["none", "bf16", "fp16", "w8a8"])
def test_native_numerics_are_close(tmp_path: Path, node: Node, quant: str) -> None:
    """Rotary positions call cos and sin, attention sums in an order of its own."""
    kv = "float16" if quant == "w8a8" else "float32"
    artifact = compiled(tmp_path / "artifact", quant=quant, kv=kv, numerics="native", replay=None)
    (game,) = node(artifact.path, prompt=TOKENS[:PROMPT], tokens=TOKENS[PROMPT:], thresholds=[None])["games"]
    pair = (g["logits"] for g in (game, native(artifact, "compiled")))
    found, expected = (torch.tensor(np.frombuffer(bytes.fromhex("".join(rows)), np.float32).copy()) for rows in pair)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 if quant != "w8a8" else 0.2)
