"""benchmarks/doom.py: its jobs, its page, and which part of the step a kernel belongs to. Nothing is measured."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from manifests import stored_thresholds

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from doom import Measured, tables_of, thresholds_of  # noqa: E402
from speed.doom_plan import DoomPlan, sizes_of  # noqa: E402
from speed.engines import OURS  # noqa: E402
from speed.parts import ATTENTION, GATE, HEAD, INPUT, KV, LINEARS, MLP, OTHER, PARTS, part_of  # noqa: E402
from speed.report import rows_of  # noqa: E402
from speed.runner import Result  # noqa: E402
from speed.sizes import DENSE, PLAY, Traffic  # noqa: E402

CONFIG: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 1536, "num_hidden_layers": 5, "vocab_size": 1024, "tokens_per_frame": 65,
    "head_dim": 64, "num_key_value_heads": 1,
}  # fmt: skip


@pytest.fixture
def plan(tmp_path: Path) -> DoomPlan:
    """Two layers' thresholds would not fit; nothing is decoded here."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    sizes = sizes_of(tmp_path, frames=16, threads=2, rounds=3)
    return DoomPlan(sizes, tmp_path, tmp_path / "starts", tmp_path / "files", "tas", (0.5,) * 5)


def test_the_page_has_ratios_within_a_round(plan: DoomPlan) -> None:
    """Frames per second count every token; a ratio is the median over rounds, and not that of the medians."""
    seconds = {
        (OURS, DENSE): [1e-3, 2e-3, 4e-3],
        (OURS, PLAY): [0.5e-3, 2e-3, 2e-3],
        ("openvino", DENSE): [2e-3, 6e-3, 8e-3],
    }
    jobs = {OURS: plan.jobs((("w8a8", "float16"),), ())[0], "openvino": plan.jobs((), (("openvino", "int8"),))[0]}
    results = [
        Result(jobs[engine], variant, samples, replay=0.6, logits=[1.0], traffic=Traffic(1, 0, 0), version="1")
        for (engine, variant), samples in seconds.items()
    ]
    quarters = dict.fromkeys(PARTS, 0.25)
    parts = {"2": {"dense": quarters}, "1": {"dense": quarters, "all replayed": quarters}}
    text = "".join(tables_of(plan.sizes, Measured(rows_of(results, [1.0], 0.0), parts)).values())
    assert "| fastcar_compile | w8a8 | float16 | dense | 2.000 | 1.000 - 4.000 | 7.7 |  |" in text
    assert "| fastcar_compile | w8a8 | float16 | 60% (play) | 2.000 | 0.500 - 2.000 | 7.7 | 2.00x |" in text
    assert "8 bit: w8a8 with float16 KV is 2.00x as fast as the fastest peer, openvino int8." in text
    assert "| part | 1 thread, dense | 1 thread, all replayed | 2 threads, dense |" in text
    assert f"| the step | {' | '.join(['2.250'] * 3)} |" in text


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
