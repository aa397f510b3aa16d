"""Decoding loads neither torch nor the compiler, and lives with both in one process."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import fresh_process
from decoders import llama

import fastcar_compile as fc

HEAVY = "torch transformers onnx onnxruntime onnxscript jinja2 tvm "
HEAVY += "fastcar_compile.ir.ops fastcar_compile.ir.program fastcar_compile.codegen"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> fc.Artifact:
    folder = tmp_path_factory.mktemp("light") / "artifact"
    return fc.compile(llama(num_hidden_layers=1), target="cpu", tokens_per_frame=8, prefill_chunk=1, output=folder)


def test_importing_the_package_loads_no_other_module_of_it() -> None:
    names = "[m for m in sys.modules if m.startswith('fastcar_compile.') or m in ('numpy', 'pydantic')]"
    assert fresh_process("-c", f"import sys, fastcar_compile; print({names})") == "[]\n"


def test_every_public_name_is_there() -> None:
    assert set(dir(fc)) == {*fc.__all__, "__version__"}
    for name in fc.__all__:
        assert getattr(fc, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fc.nothing  # noqa: B018  (the point of the test)


DECODE = f"""
import sys
import numpy as np
import fastcar_compile as fc
artifact = fc.load(sys.argv[1])
print(artifact.session("cpu").generate(np.array([[1, 2, 3]]), 12).tolist())
artifact.explain()
loaded = [m for m in "{HEAVY}".split() if m in sys.modules]
assert not loaded, loaded
"""

AFTER = """
import torch
import tvm
from tvm import relax
session = artifact.session("cpu")
tokens = session.generate(torch.tensor([[1, 2, 3]]), 12)
assert isinstance(tokens, torch.Tensor)
print(tokens.tolist())
"""


def test_decoding_loads_no_compiler_and_lives_with_it(artifact: fc.Artifact) -> None:
    lines = fresh_process("-c", DECODE + AFTER, artifact.path).splitlines()
    expected = artifact.session("cpu").generate(np.array([[1, 2, 3]]), 12).tolist()
    assert lines == [str(expected)] * 2


class Spoken:
    """An array of another library: all that is known of it is DLPack."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __dlpack__(self, **options: Any) -> object:
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._values.__dlpack_device__()


def test_a_session_gives_the_kind_that_it_gets(artifact: fc.Artifact) -> None:
    session, token = artifact.session("cpu"), np.array([3])
    kinds = {np.ndarray: token, torch.Tensor: torch.from_numpy(token), Spoken: Spoken(token), list: [3]}
    results = []
    for kind, value in kinds.items():
        session.reset()
        results.append(session.step(value))
        assert isinstance(results[-1], torch.Tensor if kind is torch.Tensor else np.ndarray)
        np.testing.assert_array_equal(np.asarray(results[-1]), np.asarray(results[0]))


def test_a_sampler_gets_the_kind_of_the_prompt(artifact: fc.Artifact) -> None:
    session, seen = artifact.session("cpu"), list[type]()

    def sample(logits: torch.Tensor) -> torch.Tensor:
        seen.append(type(logits))
        return logits.argmax(-1)

    tokens = session.generate(torch.tensor([[1, 2, 3]]), 4, sample)
    assert (set(seen), tokens.dtype) == ({torch.Tensor}, torch.int64)
    assert session.generate(np.array([[1, 2, 3]]), 4).tolist() == tokens.tolist()
