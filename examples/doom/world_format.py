"""What decoder, tokenizer and player agree on: sizes, tokens, actions and the keys that hold them."""

from dataclasses import dataclass

SIZE = 64
"""Pixels per side of a frame."""

GRID = 8
"""Image tokens per side of a frame."""

LEVELS = (8, 5, 5, 5)
"""Levels of finite scalar quantisation. Their product is the number of image codes."""

CODES = 1000
FIRST_ACTION = CODES
TOKENS_PER_FRAME = 1 + GRID * GRID
CONTEXT_FRAMES = 16
VOCAB_SIZE = 1024
"""Image codes 0-999, actions from 1000 on, and a rest that is never used: vectors of 16 fill evenly."""

FRAMES_PER_SECOND = 35 / 3


@dataclass(frozen=True)
class Action:
    """A named set of buttons that are held together."""

    name: str
    buttons: tuple[str, ...]


ACTIONS = (
    Action("still", ()),
    Action("turn left", ("left",)),
    Action("turn right", ("right",)),
    Action("forward", ("forward",)),
    Action("forward left", ("forward", "left")),
    Action("forward right", ("forward", "right")),
    Action("back", ("back",)),
    Action("strafe left", ("strafe_left",)),
    Action("strafe right", ("strafe_right",)),
    Action("shoot", ("fire",)),
)

BUTTONS = {
    "forward": ("ArrowUp", "KeyW"),
    "back": ("ArrowDown", "KeyS"),
    "left": ("ArrowLeft", "KeyQ"),
    "right": ("ArrowRight", "KeyE"),
    "strafe_left": ("KeyA",),
    "strafe_right": ("KeyD",),
    "fire": ("Space",),
}
"""Button -> KeyboardEvent.code of the keys that press it."""
