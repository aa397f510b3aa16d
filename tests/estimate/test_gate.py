"""Gates in the estimate: bytes and time, on the accelerator and on the host."""

from dataclasses import replace

import pytest

from fastcar_compile.codegen.hls.design.memory import capacity, require_fit
from fastcar_compile.codegen.hls.model import Estimate, Workload, estimate, load_shape
from fastcar_compile.codegen.hls.model.workload import GateModel
from fastcar_compile.config.targets import load_target
from fastcar_compile.errors import CompileError, InputError

SHAPE = load_shape("tinyllama-1.1b").model_copy(update={"layers": 2})
ZCU102 = load_target("zcu102")
WORK = Workload(SHAPE, "w8a8", 128, batch=2, offload="mlp", replay=0.5)


def with_gate(name: str, units: int | None = None, *, on_host: bool = False, **changes: float) -> Estimate:
    gate = replace(GateModel.named(name, units), on_host=on_host)
    return estimate(replace(WORK, gate=gate, **changes), ZCU102)


def times(result: Estimate) -> dict[str, int]:
    """Segment name -> how often it is in the time line."""
    names = [segment["name"] for segment in result.time_line]
    return {name: names.count(name) for name in names}


def test_bytes_of_cache_and_weights() -> None:
    result = with_gate("learned", 8)
    cache = SHAPE.layers * SHAPE.tokens_per_frame * 2 * SHAPE.hidden * 4
    weights = SHAPE.layers * (2 * 8 * 2 * SHAPE.hidden + 4 * 17)
    sizes = {"units": 8, "cache_bytes": cache, "weight_bytes": weights}
    assert result.gate == {"name": "learned", "decided_on": "accelerator"} | sizes
    assert result.memory["gate_cache"] == cache
    assert result.memory["weights"] == SHAPE.weight_bytes("w8a8") + weights
    assert result.memory["total"] == with_gate("tas").memory["total"] + cache + weights
    assert with_gate("input_delta").memory["gate_cache"] == cache
    assert with_gate("tas").gate["cache_bytes"] == 0


def test_the_controller_decides_and_the_host_the_gates_that_it_has_not() -> None:
    unit, change = (times(with_gate(name)) for name in ("tas", "input_delta"))
    host = times(with_gate("input_delta", on_host=True))
    for own in (unit, change, times(with_gate("learned"))):
        assert own["TAS, DRS"] == SHAPE.layers
        assert "gate" not in own
    assert host["gate"] == SHAPE.layers
    assert "TAS, DRS" not in host  # the launch of the MLP places its rows
    # The gate reads the norm, so it is computed in a layer that replays as well; and there is one before the head.
    assert change["norm"] == 2 * SHAPE.layers + 1
    assert with_gate("tas", replay=1.0).time_line[0]["name"] == "norm"
    assert times(with_gate("tas", replay=1.0))["norm"] == SHAPE.layers + 1


def test_time_of_a_decision_grows_with_the_network() -> None:
    def seconds(result: Estimate) -> float:
        return sum(s["seconds"] for s in result.time_line if s["name"] == "TAS, DRS")

    results = with_gate("input_delta"), with_gate("learned", 8), with_gate("learned", 64)
    none, few, many = map(seconds, results)
    assert 0 < none < few < many


def test_a_gate_cache_that_does_not_fit_is_named() -> None:
    whole = replace(WORK, gate=GateModel.named("learned")).footprint(ZCU102)
    with pytest.raises(CompileError) as raised:
        require_fit(replace(whole, gate_cache=capacity(ZCU102)), ZCU102, quant="w8a8", positions=128)
    assert f"gate cache {capacity(ZCU102) / 1e9:.2f} GB, together" in str(raised.value)
    assert "a gate without a cache of its own, such as tas" in str(raised.value)


def test_unknown_gates_and_needless_units() -> None:
    with pytest.raises(InputError, match="unknown gate 'mean'"):
        GateModel.named("mean")
    with pytest.raises(InputError, match="gate 'tas' has no hidden units"):
        GateModel.named("tas", 4)
