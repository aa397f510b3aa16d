"""What target and model decide of the options, and the reasons that a dry run gives."""

from typing import Any

import pytest

import fastcar_compile as fc
from fastcar_compile.config.options import WHOLE_STEP, asked
from fastcar_compile.config.resolve import Resolved, resolve
from fastcar_compile.errors import CompileError

SAYS = {"tokens_per_frame": 16, "max_seq_len": 64}


def resolved(target: str, says: dict[str, Any] = SAYS, **options: Any) -> Resolved:
    given: Any = options
    return resolve(asked(given), fc.load_target(target), says)


def test_a_cpu_has_the_model_s_sizes_and_float32() -> None:
    found = resolved("cpu")
    config = found.config
    assert (config.tokens_per_frame, config.max_seq_len, config.rows, found.whole) == (16, 64, None, None)
    assert (config.quant, config.kv, config.numerics, config.offload) == ("none", "float32", "native", "mlp")
    assert config.replay == fc.ReplayConfig()
    assert found.reasons == {
        "tokens_per_frame": "the model's config",
        "max_seq_len": "the model's config",
        "rows": "all videos are at one position",
        "quant": "target cpu has no accelerator",
        "kv": "nothing asks for int8",
        "numerics": "nothing asks for exact",
        "offload": "target cpu has no accelerator",
        "engine": "target cpu has no accelerator",
    }


def test_a_frame_that_nobody_knows_is_assumed() -> None:
    found = resolved("cpu", {"tokens_per_frame": None, "max_seq_len": 1024})
    assert found.assumes_frame
    assert found.config.tokens_per_frame == 256
    assert not resolved("cpu", tokens_per_frame=4).assumes_frame


def test_an_order_says_its_rows() -> None:
    found = resolved("zcu102", jacobi=fc.Jacobi(4))
    assert (found.config.rows, found.reasons["rows"]) == (4, "jacobi needs them")
    assert (found.config.offload, found.whole) == ("all", None), "only whole steps have rows"
    assert found.config.kv == "int8"
    assert found.reasons["kv"] == "offload all has it"
    with pytest.raises(CompileError, match="need whole decode steps on the accelerator, not offload='mlp'"):
        resolved("zcu102", rows=2, offload="mlp")


def test_whole_steps_are_tried_where_nothing_excludes_them() -> None:
    found = resolved("zcu102")
    assert found.whole is not None
    assert (found.config.offload, found.whole.offload) == ("mlp", "all")
    whole, linears = found.offloading("all", "fast"), found.offloading("linears", "faster")
    assert {name: getattr(whole.config, name) for name in WHOLE_STEP} == WHOLE_STEP
    assert (whole.reasons["offload"], whole.reasons["numerics"]) == ("fast", "offload all has it")
    assert (linears.config.offload, linears.config.kv, linears.config.numerics) == ("linears", "int8", "native")
    assert (linears.reasons["kv"], linears.reasons["numerics"]) == ("offload linears has it", "nothing asks for exact")
    excluding: list[dict[str, Any]] = [{"kv": "float16"}, {"numerics": "native"}, {"quant": "bf16"}]
    for options in excluding:
        assert resolved("zcu102", **options).whole is None
        assert resolved("zcu102", **options).reasons["offload"] == "the other options exclude whole steps"
    assert "offload" not in resolved("zcu102", offload="linears").reasons, "it is given"


@pytest.mark.parametrize("option", [{"offload": "mlp"}, {"engine": "hls"}])
def test_an_option_of_accelerators_is_refused_on_a_cpu(option: dict[str, Any]) -> None:
    with pytest.raises(CompileError, match="needs an accelerator, and target cpu has none"):
        resolved("cpu", **option)
