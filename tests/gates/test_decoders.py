"""Every gate in a whole graph: what opens and closes it within first frame, chain and refresh. That backends decide
alike is tested with each kind of score: test_hls.py, test_authors_rule.py, tests/extension, tests/families."""

from typing import Any

import pytest
from passes.tiny import FRAME, WIDTH, after, decode

from fastcar_compile.gates import GATES
from fastcar_compile.passes.insert_replay import InsertReplay
from fastcar_compile.passes.pipeline import analysis_pipeline

from .networks import networks

OPTIONS: dict[str, dict[str, Any]] = {
    "tas": {"heads": (((0, 1.0), (1, -0.5)),), "max_chain": 2}, "input_delta": {"refresh_every": 3},
    "learned": {"gate_weights": networks(WIDTH, 5), "max_chain": 3, "couple_cfg": True},
    "random": {"max_chain": 1, "refresh_every": 2}, "always": {"refresh_every": 4}, "never": {},
}  # fmt: skip


@pytest.mark.parametrize("name", GATES)
def test_the_thresholds_never_and_always(name: str) -> None:
    """The comparison's own infinities close and open every gate."""
    comparison, options = GATES[name].comparison, OPTIONS[name]
    program = after(*analysis_pipeline(), InsertReplay((0.0,), gate=name, **options))
    assert not any(result.decisions.any() for result in decode(program, comparison.never))
    for t, result in enumerate(decode(program, comparison.always)):
        visits = range(t % FRAME, t + 1, FRAME)
        assert set(result.decisions.flatten()) == {expected_when_open(list(visits), options)}, t


def expected_when_open(visits: list[int], options: dict[str, Any]) -> bool:
    """Whether the last of these visits to a slot replays when every score passes."""
    chain, replay = 0, False
    for t in visits:
        refresh = options.get("refresh_every")
        replay = t >= FRAME and not (refresh and t // FRAME % refresh == 0) and chain < options.get("max_chain", 99)
        chain = chain + 1 if replay else 0
    return replay
