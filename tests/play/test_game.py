"""The game without its server: draws, sides, thresholds, full contexts, pace and recordings."""

import io
import json
import queue
from contextlib import suppress
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
from PIL import Image, ImageSequence

from fastcar_compile.errors import InputError
from fastcar_compile.gates.base import Comparison
from fastcar_play import limits, visit
from fastcar_play.game import Beginning, Game, Mode, Moment, Replayable, Side, Stage, threshold_levels
from fastcar_play.messages import Keys, Request, Restart, Run, SetThreshold, Visible, parse_request
from fastcar_play.pace import IN_FLIGHT, Pace
from fastcar_play.recording import GAP, Recording, most_frames
from fastcar_play.visit import Visit

from .worlds import COLOURS

KEYS = (["forward", "left"], [], ["left"], ["fire"], ["forward"], [], ["left"], ["left"])


def codes(moment: Moment, side: Side) -> list[int]:
    (step,) = [view.step for view in moment.views if view.side is side]
    assert step is not None
    return step.codes.tolist()


def played(
    stage: Stage, mode: Mode, beginning: Beginning, threshold: float | None = None
) -> dict[Side, list[list[int]]]:
    game = Game(stage)
    game.set_mode(mode)
    game.begin(beginning)
    game.set_threshold(None)
    found: dict[Side, list[list[int]]] = {side: [] for side in mode.sides}
    for held in KEYS:
        moment = game.advance(held)
        for side, frames in found.items():
            frames.append(codes(moment, side))
    game.close()
    return found


def test_the_same_seed_gives_the_same_frames_on_both_sides(stage: Stage) -> None:
    """Replay that never replays is the dense decoder, and a frame of the picture has its tokens' colours."""
    first = played(stage, Mode.BOTH, Beginning(seed=7))
    assert first[Side.DENSE] == first[Side.REPLAY]
    assert played(stage, Mode.DENSE, Beginning(seed=7))[Side.DENSE] == first[Side.DENSE]
    assert played(stage, Mode.REPLAY, Beginning(seed=7))[Side.REPLAY] == first[Side.DENSE]
    others = [Beginning(seed=8), Beginning(seed=7, start=1), Beginning(seed=7, temperature=0.0)]
    assert first[Side.DENSE] not in [played(stage, Mode.DENSE, other)[Side.DENSE] for other in others]


def test_thresholds_change_one_side_and_levels_go_from_never_to_often(stage: Stage) -> None:
    game = Game(stage)
    game.set_mode(Mode.BOTH)
    levels = stage.replay.levels
    assert len(levels) == 101
    assert levels[0] is None
    shares = []
    for level in (0, 50, 100):
        game.begin(Beginning())
        game.set_threshold(levels[level])
        steps = [view.step for held in KEYS for view in game.advance(held).views]
        dense, replay = ([float(step.decisions.mean()) for step in steps[side::2] if step] for side in (0, 1))
        assert max(dense) == 0
        assert replay[0] == 0, "the first frame has nothing to replay"
        shares.append(np.mean(replay[1:]))
    assert shares[0] == 0 < shares[1] < shares[2]
    game.close()


def test_levels_follow_the_comparison() -> None:
    scores = np.arange(100, dtype=np.float32)
    for comparison in Comparison:
        never, *others = threshold_levels(scores, comparison)
        limits = np.array(others, np.float32)[:, None]
        passes = scores >= limits if comparison is Comparison.AT_LEAST else scores <= limits
        passed = passes.sum(1).tolist()
        assert never is None
        assert passed == sorted(passed)
        assert all(abs(count - share) <= 1 for share, count in enumerate(passed, 1))


def test_a_full_context_goes_on_with_the_last_frames(stage: Stage) -> None:
    game = Game(stage)
    moments = list[Moment]()
    for number in range(20):
        moments.append(game.advance([]))
        if number % 2:
            game.settle()
    refilled = [m.number for m in moments if m.views[0].step and m.views[0].step.refilled]
    assert refilled == [9, 17], "12 frames fit: 4 of the start, or the last 4, and 8 behind them"
    assert [m.number for m in moments] == list(range(1, 21))
    game.close()


def test_a_second_side_begins_where_the_first_one_is(stage: Stage) -> None:
    game = Game(stage)
    game.set_threshold(None)
    for held in KEYS[:3]:
        game.advance(held)
    game.set_mode(Mode.BOTH)
    before = game.first()
    assert np.array_equal(before.views[0].picture, before.views[1].picture)
    moment = game.advance(["left"])
    assert codes(moment, Side.DENSE) == codes(moment, Side.REPLAY)
    for mode in (Mode.DENSE, Mode.REPLAY, Mode.BOTH):
        game.set_mode(mode)
        assert [view.side for view in game.first().views] == list(mode.sides)
    game.close()


def test_a_decoder_without_replay_is_dense(stage: Stage) -> None:
    game = Game(replace(stage, gate=None, replay=Replayable(None)))
    assert game.mode is Mode.DENSE
    with pytest.raises(InputError, match="compiled without replay"):
        game.set_mode(Mode.BOTH)
    with pytest.raises(InputError, match="compiled without replay"):
        game.set_threshold(0.5)
    with pytest.raises(InputError, match="there is no start 2"):
        game.begin(Beginning(start=2))
    moment = game.advance([])
    assert np.array_equal(moment.views[0].picture.reshape(-1, 3), COLOURS[codes(moment, Side.DENSE)])
    game.close()


def test_the_pace_is_the_worlds_at_most_and_the_pages_at_most() -> None:
    pace = Pace(10.0)
    assert pace.wait(0.0) is None, "nobody plays yet"
    pace.running = True
    assert pace.wait(0.0) == 0
    pace.begun(5.0)
    pace.made(5.02)
    pace.begun(5.02)
    assert pace.made(5.04) == pytest.approx(50)
    assert pace.wait(5.04) == pytest.approx(0.06), "frames are due at 5.0, 5.1 and so on"
    for _ in range(IN_FLIGHT - pace.sent):
        pace.made(5.1)
    assert pace.wait(9.0) is None, "the page draws nothing"
    pace.drawn(1)
    assert pace.wait(9.0) == 0
    pace.drawn(10**6)
    pace.made(9.0)
    assert pace.wait(9.0) == 0, "a number that was never sent buys no frames"
    for _ in range(IN_FLIGHT - 1):
        pace.made(9.0)
    assert pace.wait(9.5) is None
    pace.drawn(pace.sent)
    pace.limited = False
    pace.begun(20.0)
    pace.begun(20.0)
    assert pace.wait(20.0) == pytest.approx(1 / limits.FRAMES_PER_SECOND), "the world's limit is lifted"
    pace.visible = False
    assert pace.wait(99.0) is None


def test_a_recording_is_bounded_and_keeps_time(stage: Stage) -> None:
    image = stage.world.file.image
    one, two = np.full((2, 2, 3), 200, np.uint8), np.zeros((2, 2, 3), np.uint8)
    recording, long = Recording(image), Recording(image)
    for number in range(1000):
        long.add([one], number / 20)
    assert (long.full, len(long), most_frames(image)) == (True, 600, 600)
    assert most_frames(image.model_copy(update={"size": (1024, 1024)})) == 10
    for time, pictures in ((0.0, [one]), (0.05, [one, two]), (0.1, [one]), (9.0, [two])):
        recording.add(pictures, time)
    with Image.open(io.BytesIO(recording.gif())) as gif:
        durations = []
        for page in ImageSequence.Iterator(gif):
            durations.append(page.info["duration"])
            assert page.convert("RGB").getpixel((gif.width // 2 - 1, 0)) in ((200, 200, 200), (0, 0, 0))
    assert durations == [50, 50, 1000, 1000], "a pause is short in a recording"
    assert image.pixel_shape == (4, 3)
    assert gif.width * 2 * 3 == gif.height * (4 + GAP) * 4


@pytest.mark.parametrize(
    "text",
    [
        *("{", '{"type":"nothing"}', '{"type":"keys"}', '{"type":"keys","held":[1]}', '{"type":"drawn","serial":-1}'),
        *('{"type":"threshold","value":NaN}', '{"type":"threshold","value":"x"}', '{"type":"mode","value":"fast"}'),
        '{"type":"keys","held":["' + "a" * 5000 + '"]}',
    ],
)
def test_a_message_that_no_page_sends_is_refused(text: str) -> None:
    """tests/fuzz has any change of one."""
    with pytest.raises(InputError, match="the message is"):
        parse_request(text)


def test_a_message_of_the_page_is_read() -> None:
    assert parse_request('{"type":"threshold","value":2}') == SetThreshold(type="threshold", value=2.0)
    assert parse_request('{"type":"threshold","value":"compiled"}') == SetThreshold(type="threshold", value="compiled")
    assert parse_request('{"type":"keys","held":["left"]}') == Keys(type="keys", held=["left"])


def visited(stage: Stage, *requests: Request) -> list[str | bytes]:
    """What a page gets that sends these messages at once, draws nothing and leaves when nothing more comes."""
    sent = queue.Queue[str | bytes]()
    guest = Visit(stage, sent.put, lambda: False)
    for request in requests:
        assert guest.post(request)
    thread = Thread(target=guest.run)
    thread.start()
    found: list[str | bytes] = []
    with suppress(queue.Empty):
        while True:
            found.append(sent.get(timeout=5 if not found else 0.3))
    guest.stop()
    thread.join()
    return found


def test_a_stalled_page_gets_few_frames_and_an_unseen_one_none(stage: Stage) -> None:
    start = Run(type="run", value=True)
    frames = [item for item in visited(stage, start) if isinstance(item, bytes)]
    assert len(frames) == IN_FLIGHT, "the first picture is one of them"
    hidden = [item for item in visited(stage, start, Visible(type="visible", value=False)) if isinstance(item, bytes)]
    assert len(hidden) == 1


def test_a_page_that_reads_nothing_is_not_answered(stage: Stage) -> None:
    sent: list[str | bytes] = []

    def congested() -> bool:
        guest.stop()
        return True

    guest = Visit(stage, sent.append, congested)
    for seed in range(100):
        guest.post(Restart(type="restart", start=0, seed=seed, temperature=1.0, top_k=0))
    guest.run()
    assert len(sent) < 5


def test_a_refused_request_is_a_note_and_the_game_goes_on(stage: Stage) -> None:
    bad = Restart(type="restart", start=9, seed=0, temperature=1.0, top_k=0)
    sent = visited(stage, bad, Run(type="run", value=True))
    assert len([item for item in sent if isinstance(item, bytes)]) == IN_FLIGHT
    notes = [item for item in visited(stage, bad) if isinstance(item, str)]
    assert any("there is no start 9" in note for note in notes)


def test_a_game_that_nobody_plays_is_paused_and_then_ended(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit, "AWAY_SECONDS", 0.05)
    monkeypatch.setattr(visit, "GONE_SECONDS", 0.2)
    texts = [json.loads(item) for item in visited(stage, Run(type="run", value=True)) if isinstance(item, str)]
    assert [text.get("running") for text in texts] == [False, True, False, None]
    assert texts[2]["note"].startswith("Paused")
    assert texts[3]["reason"].startswith("nobody has played for long")
