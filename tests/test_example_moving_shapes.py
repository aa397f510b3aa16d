"""The moving-shapes example: its data, its pictures and the decoder it ships."""

import importlib
import json
import logging
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import check_module, imported
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rich.console import Console

import fastcar_compile as fc
from fastcar_compile.support.values import LOGGER

FOLDER = Path(__file__).parents[1] / "examples" / "moving_shapes"
NAMES = ("video", "evaluate", "render", "train", "generate", "demo")
NLL_LIMIT = 0.04  # nats per token on 8 unseen videos; 32 give 0.020
SIZE_LIMIT = 4 * 2**20


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules, imported as its own scripts import them."""
    check_module("PIL")
    with imported([FOLDER], NAMES) as modules:
        yield modules


@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_tokens_are_lossless(example: SimpleNamespace, data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), 32, 32)
    video = data.draw(arrays(np.uint8, shape, elements=st.integers(0, 1)))
    tokens = example.video.tokenize(video)
    assert tokens.shape == (shape[0], shape[1] * 256)
    assert tokens.dtype == np.int64
    assert tokens.min() >= 0
    assert tokens.max() < example.video.BOS
    back = example.video.detokenize(tokens)
    assert back.dtype == np.uint8
    np.testing.assert_array_equal(back, video)


def test_token_order_is_raster_with_the_first_pixel_lowest(example: SimpleNamespace) -> None:
    video = np.zeros((1, 2, 32, 32), np.uint8)
    video[0, 0, 0, 0] = 1  # patch 0, bit 0
    video[0, 0, 0, 3] = 1  # patch 1, bit 1
    video[0, 1, 3, 0] = 1  # second frame, second row of patches, bit 2
    tokens = example.video.tokenize(video)[0]
    assert {int(place): int(tokens[place]) for place in tokens.nonzero()[0]} == {0: 1, 1: 2, 256 + 16: 4}


def test_detokenize_takes_whole_frames_and_shows_bos_as_empty(example: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="300 tokens are not a whole number of frames of 256"):
        example.video.detokenize(np.zeros((1, 300), np.int64))
    assert not example.video.detokenize(np.full((1, 256), example.video.BOS)).any()


@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=20)
def test_videos_repeat_and_move(example: SimpleNamespace, seed: int) -> None:
    videos = example.video.make_videos(4, seed)
    assert videos.shape == (4, 8, 32, 32)
    assert videos.dtype == np.uint8
    assert set(np.unique(videos)) == {0, 1}
    np.testing.assert_array_equal(videos, example.video.make_videos(4, seed))
    assert (videos[:, 1:] != videos[:, :-1]).any((1, 2, 3)).all(), "a video stands still"
    assert videos.any((2, 3)).all(), "a frame is empty"


def test_shipped_decoder_is_small_and_good(example: SimpleNamespace) -> None:
    folder = example.evaluate.MODEL
    assert sum(file.stat().st_size for file in folder.iterdir()) <= SIZE_LIMIT
    config = json.loads((folder / "config.json").read_text())
    assert (config["tokens_per_frame"], config["vocab_size"], config["max_position_embeddings"]) == (256, 17, 2049)
    log = json.loads((folder / "training_log.json").read_text())
    assert log[-1]["held_out_nll_frames_2_to_8"] <= NLL_LIMIT
    model = example.evaluate.load_model()
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (128, 4)
    videos = example.video.make_videos(8, example.evaluate.HELD_OUT_SEED + 1)
    assert example.evaluate.teacher_forced_nll(model, videos) <= NLL_LIMIT


def test_generation_continues_the_given_frames(example: SimpleNamespace) -> None:
    start = example.video.make_videos(1, 4, frames=1)
    model = example.evaluate.load_model()
    made = example.generate.continue_videos(model, start, frames=2)
    assert made.shape == (1, 2, 32, 32)
    np.testing.assert_array_equal(made[:, :1], start)
    assert made[:, 1].any()


def test_pictures_are_readable_and_repeat(example: SimpleNamespace, tmp_path: Path) -> None:
    image_module = importlib.import_module("PIL.Image")
    truth, other = example.video.make_videos(2, 6)
    for name in ("a", "b"):
        example.render.write_strip({"truth": truth, "other": other}, tmp_path / f"{name}.png", reference="truth")
        example.render.write_gif(truth, tmp_path / f"{name}.gif")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()
    with image_module.open(tmp_path / "a.png") as strip:
        assert strip.width > 8 * 32 * 4
        assert strip.height > 3 * 32 * 4, "truth, other, and the difference of the two"
        assert len(strip.convert("RGB").getcolors()) == 6  # four pixel values, gap, text
    with image_module.open(tmp_path / "a.gif") as gif:
        assert (gif.n_frames, gif.size) == (8, (256, 256))
        for index, frame in enumerate(truth):
            gif.seek(index)
            shown = np.array(gif.convert("L")) > 128
            np.testing.assert_array_equal(shown, frame.repeat(8, 0).repeat(8, 1).astype(bool))


@pytest.mark.parametrize(
    ("cache", "end"),
    [
        (None, "are 2.0 MiB"),
        (2**20, "are 2.0 MiB, read from memory: this CPU's largest cache has 1 MiB"),
        (2**25, "and stay in this CPU's 32 MiB cache; larger decoders: docs/measurements/speed.md"),
    ],
)
def test_the_demo_says_why(example: SimpleNamespace, cache: int | None, end: str) -> None:
    line = example.demo.verdict(np.array([1.01, 0.97, 0.9]), np.array([1.1, 1.1, 1.15]), 2**21, cache)
    assert line.startswith(
        "speed    replay is 0.97 (0.90 to 1.01) times as fast as dense; if every MLP replayed, 1.10 ("
    )
    assert ": median and range of 3 rounds. " in line
    assert line.endswith(end)
    assert "\n" not in line


def test_the_demo_compiles_without_a_word_of_a_library(
    example: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fake_compile(model: object, **_options: object) -> str:
        assert isinstance(model, Path), "loading it with Transformers draws a bar"
        LOGGER.warning("no linker for the board")
        return "artifact"

    monkeypatch.setattr(fc, "compile", fake_compile)
    monkeypatch.setattr(LOGGER, "level", LOGGER.level)
    options = Namespace(
        folder=FOLDER / "tuned", target="zcu102", gate="learned", target_replay=0.85, out=Path("unused")
    )
    assert example.demo.compiled(options, Console(quiet=True)) == "artifact"
    assert not LOGGER.isEnabledFor(logging.WARNING)
    assert capfd.readouterr() == ("", "")
