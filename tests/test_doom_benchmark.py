"""benchmarks/doom.py: which part of the step a kernel belongs to, and whose thresholds it plays with."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from manifests import stored_thresholds

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from doom import thresholds_of  # noqa: E402
from speed.parts import ATTENTION, GATE, HEAD, INPUT, KV, LINEARS, MLP, OTHER, part_of  # noqa: E402


@pytest.mark.parametrize(
    ("kernel", "arguments", "part"),
    [
        ("attend_to_window", {"key_cache_0", "value_cache_0"}, ATTENTION),
        ("append", {"key_cache_3"}, KV),
        ("temporal_score", {"key_cache_3"}, GATE),
        ("decide", {"thresholds"}, GATE),
        ("relative_change", {"model.layers.1.post_attention_layernorm.weight"}, GATE),
        ("write_slots", {"mlp_cache_1"}, GATE),
        ("linear_i8_x3", {"model.layers.0.self_attn.q_proj.weight_int8"}, LINEARS),
        ("quantize_rows_i8", set[str](), LINEARS),
        ("linear_i81", {"model.layers.0.mlp.down_proj.weight_int8"}, MLP),
        ("normalize_quantize_rows", {"model.layers.4.post_attention_layernorm.weight"}, MLP),
        ("activate_quantize_i8", set[str](), MLP),
        ("linear_i84", {"lm_head.weight_int8"}, HEAD),
        ("fused_take_add_cos", {"model.embed_tokens.weight"}, INPUT),
        ("fused_reshape5_add1", set[str](), OTHER),
    ],
)
def test_kernels_belong_to_parts(kernel: str, arguments: set[str], part: str) -> None:
    """The game decoder's own kernels and the names of what they read."""
    assert part_of(kernel, arguments) == part


def test_a_layer_without_replay_has_a_threshold_that_nothing_passes(tmp_path: Path) -> None:
    """And without a file there is no row for play."""
    stored_thresholds(0.25, None).save(tmp_path / "thresholds.json")
    assert thresholds_of(tmp_path / "thresholds.json", 0.5) == ("tas", (0.25, math.inf))
    assert thresholds_of(None, 0.5) == ("tas", ())
    cases: list[dict[str, Any]] = [{"calibration": "dense", "target": None, "replay": None}]
    for target, values in ((0.3, [2.0, None]), (0.5, ["-inf", None])):
        cases.append({"calibration": "tas, mean of heads", "target": target, "replay": {"threshold": values}})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    assert thresholds_of(tmp_path / "cases.json", 0.5) == ("tas", (-math.inf, math.inf))
