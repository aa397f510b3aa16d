"""What a library's path holds when it is opened is what runs, whatever the process loaded from that path before."""

import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tvm
from tvm import relax

from fastcar_compile.codegen.tvm.target import host_target
from fastcar_compile.errors import BackendError
from fastcar_compile.runtime.tvm_runtime import Machine, adopt, aligned, as_array


def write_library(path: Path, factor: float) -> None:
    """Write a library whose `run` multiplies four numbers by the factor."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(cast("Any", (4,)), "float32"))
    with builder.function("run", [x]):
        builder.emit_func_output(builder.emit(relax.op.multiply(x, relax.const(factor, "float32"))))
    steps = relax.backend.cpu_generic.get_default_pipeline(host_target())
    executable: Any = tvm.compile(builder.get(), target=host_target(), relax_pipeline=cast("Any", steps))
    executable.export_library(str(path))


def ones_by(path: Path) -> Any:
    return as_array(Machine("decode.so", path.read_bytes()).function("run")(adopt(aligned(np.ones(4, np.float32)))))


def test_a_library_in_the_place_of_another_is_the_one_that_runs(tmp_path: Path) -> None:
    path, descriptors = tmp_path / "decode.so", len(os.listdir("/proc/self/fd"))
    for factor in (2.0, 3.0, 2.0):
        write_library(path, factor)
        np.testing.assert_array_equal(ones_by(path), factor)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    first = Machine("decode.so", path.read_bytes()).function("run")
    path.unlink()
    np.testing.assert_array_equal(as_array(first(adopt(aligned(np.ones(4, np.float32))))), 2.0)


def test_what_is_no_library_is_refused() -> None:
    with pytest.raises(BackendError, match="the library cannot be loaded") as refusal:
        Machine("decode.so", b"no library")
    assert "decode.so" in str(refusal.value)
