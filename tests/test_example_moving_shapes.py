"""The moving-shapes example: its data, its demo and the decoder it ships."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import check_module, imported
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

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
