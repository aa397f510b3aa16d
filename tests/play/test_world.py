"""A world's folder: what is read from it, and what is refused by name."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from fastcar_compile.errors import InputError
from fastcar_compile.ir.types import DecoderConfig
from fastcar_play import limits
from fastcar_play.pixels import Pixels
from fastcar_play.world import World, load_world

from .worlds import COLOURS, FRAMES, WORLD, colour_model, save_starts, starts, write_world

CONFIG = DecoderConfig(1, 65, 5, 2, 64, 17, False, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_world(tmp_path / "world")


def test_a_world_is_read(folder: Path) -> None:
    world = load_world(folder)
    world.check_decoder(CONFIG)
    assert (world.file.name, world.names) == ("Tiny", ("the hall", "the yard"))
    assert np.array_equal(world.starts, starts())
    codes = np.array([0, 3, 11, 3])
    assert np.array_equal(Pixels(world, 1)(codes), COLOURS[codes].reshape(2, 2, 3))


def test_the_action_has_most_of_the_held_buttons(folder: Path) -> None:
    file = load_world(folder).file
    held = {
        "": "still",
        "left": "turn left",
        "forward": "still",
        "forward left": "forward left",
        "left fire": "turn left",
    }
    assert {buttons: file.action(buttons.split()).name for buttons in held} == held
    assert file.action(["no such button", "fire"]).name == "shoot"


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("format = 1", "format = 2", "format: Input should be less than or equal to 1"),
        ("count = 12", "count = 14", "the token of 'turn left' is one of an image"),
        ("grid = [2, 2]", "grid = [2, 3]", "a frame is an action token and 6 image tokens"),
        ("aspect = [4, 3]", "aspect = [1000, 3]", "the aspect makes a pixel 333 times as wide as high"),
        ("temperature = 1.0", "temperature = 1e-310", "it is 0 (the likeliest code), or at least 1e-30"),
        ('buttons = ["fire"]', 'buttons = ["jump"]', "unknown buttons: jump"),
        ("buttons = []", 'buttons = ["fire"]', "one action must have no buttons"),
        ('name = "Tiny"', 'name = "\\u001b[2J"', "name: String should match pattern"),
        ('name = "Tiny"', 'name = "Tiny"\nmore = 1', "more: Extra inputs are not permitted"),
    ],
)
def test_a_malformed_world_file_is_refused_by_name(folder: Path, old: str, new: str, text: str) -> None:
    assert old in WORLD
    (folder / "world.toml").write_text(WORLD.replace(old, new, 1), "utf-8")
    with pytest.raises(InputError) as caught:
        load_world(folder)
    assert text in caught.value.what
    assert caught.value.where == str(folder / "world.toml")


def cut(folder: Path) -> None:
    data = (folder / "starts.safetensors").read_bytes()
    (folder / "starts.safetensors").write_bytes(data[:-8])


def big(folder: Path) -> None:
    with (folder / "starts.safetensors").open("r+b") as file:
        file.truncate(limits.STARTS_BYTES + 1)


def pipe(folder: Path) -> None:
    (folder / "starts.safetensors").unlink()
    os.mkfifo(folder / "starts.safetensors")


def with_token(token: int, place: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tokens = starts()
        tokens[1, 2, place] = token
        save_starts(folder, tokens, ["a", "b"])

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda folder: (folder / "starts.safetensors").unlink(), "cannot be read: No such file"),
        (pipe, "it is a pipe"),
        (cut, "the tensor file cannot be read"),
        (big, "has more than"),
        (with_token(13, 0), None),
        (with_token(1, 0), "is not an action token"),
        (with_token(13, 1), "is not an action token"),
        (lambda folder: save_starts(folder, starts()[:, 1:], ["a", "b"]), "expected int64 [S, 4, 5]"),
        (lambda folder: save_starts(folder, starts().astype(np.int32), ["a", "b"]), "the starts hold int32"),
        (lambda folder: save_starts(folder, starts(), ["a"]), "there are 1 names of 2 starts"),
        (lambda folder: save_starts(folder, starts(), ["a", "\x1b[2J"]), "the names of the starts cannot be read"),
    ],
)
def test_malformed_starts_are_refused_by_name(folder: Path, change: Callable[[Path], None], text: str | None) -> None:
    change(folder)
    if text is None:
        assert load_world(folder).starts.shape == (2, FRAMES, 5)
        return
    with pytest.raises(InputError) as caught:
        load_world(folder)
    assert text in caught.value.what
    assert caught.value.where == str(folder / "starts.safetensors")


def refused_pixels(world: World, content: bytes) -> str:
    with pytest.raises(InputError) as caught:
        Pixels(replace(world, pixels=content), 1)
    assert caught.value.where.endswith("pixels.onnx")
    return caught.value.what


def test_what_makes_no_pictures_is_refused(folder: Path) -> None:
    world = load_world(folder)
    assert "cannot be loaded" in refused_pixels(world, b"no model")
    other = colour_model()
    other.graph.node[0].input[0] = other.graph.initializer[0].name = "other"
    other.graph.input[0].name = other.graph.node[0].input[1] = "codes"
    assert "cannot be run" in refused_pixels(world, other.SerializeToString())
    flat = colour_model()
    flat.graph.initializer[0].CopyFrom(numpy_helper.from_array(COLOURS[:, :2], "colours"))
    flat.graph.output[0].type.tensor_type.shape.dim[3].dim_value = 2
    assert "does not make uint8 [1, 2, 2, 3]" in refused_pixels(world, flat.SerializeToString())


@pytest.mark.timeout(120)
def test_an_operator_that_may_never_end_is_refused(folder: Path) -> None:
    """A loop whose condition stays true, in a branch. Without the refusal the first picture takes for ever."""
    flag = {name: helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("on", "still", "v", "w", "x")}
    count = helper.make_tensor_value_info("count", TensorProto.INT64, [])
    same = [
        helper.make_node("Identity", [name], [other]) for name, other in (("on", "still"), ("v", "w"), ("yes", "x"))
    ]
    body = helper.make_graph(same[:2], "body", [count, flag["on"], flag["v"]], [flag["still"], flag["w"]])
    loop = helper.make_node("Loop", ["", "yes", "yes"], ["x"], body=body)
    branches = [helper.make_graph([node], "branch", [], [flag["x"]]) for node in (loop, same[2])]
    model, yes = colour_model(), helper.make_tensor("value", TensorProto.BOOL, [], [True])
    model.graph.node.append(helper.make_node("Constant", [], ["yes"], value=yes))
    model.graph.node.append(helper.make_node("If", ["yes"], ["x"], then_branch=branches[0], else_branch=branches[1]))
    model.graph.output.append(flag["x"])
    assert "has the operator Loop, which may never end" in refused_pixels(load_world(folder), model.SerializeToString())


def test_the_pixels_read_no_other_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = colour_model()
    table = model.graph.initializer[0]
    external_data_helper.set_external_data(table, "colours.bin")
    table.ClearField("raw_data")
    table.data_location = TensorProto.EXTERNAL
    (folder / "colours.bin").write_bytes(COLOURS.tobytes())
    monkeypatch.chdir(folder)
    assert "cannot be loaded" in refused_pixels(load_world(folder), model.SerializeToString())


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (replace(CONFIG, tokens_per_frame=6), "the decoder has 6 tokens per frame, the world 5"),
        (replace(CONFIG, vocab_size=15), "the world has token 15, the decoder 15 tokens"),
        (replace(CONFIG, batch_size=2), "the decoder has 2 rows; a game is one"),
        (replace(CONFIG, vocab_size=None), "the decoder has no tokens in or out"),
        (replace(CONFIG, takes_embeddings=True), "the decoder has no tokens in or out"),
        (replace(CONFIG, max_seq_len=9), "the decoder has 9 positions, and two frames take 10"),
    ],
)
def test_a_decoder_of_another_world_is_refused(folder: Path, config: DecoderConfig, text: str) -> None:
    with pytest.raises(InputError, match=text):
        load_world(folder).check_decoder(config)
