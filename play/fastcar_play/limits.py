"""How large anything of a world or of a player's page may be, beside the package's own limits."""

from fastcar_compile.support.limits import LEAST_TEMPERATURE as LEAST_TEMPERATURE
from fastcar_compile.support.limits import MIB
from fastcar_compile.support.limits import SIZE as SIZE
from fastcar_compile.support.limits import TEXT_ERROR as TEXT_ERROR
from fastcar_compile.support.limits import TOML_BYTES as TOML_BYTES

PIXELS_BYTES = 64 * MIB
"""Bytes of a world's model that turns tokens into pictures."""

GAME_BYTES = MIB
"""Bytes of a recorded game; a minute of Doom takes about one KiB."""

STARTS_BYTES = 64 * MIB
"""Bytes of a world's starting contexts; a context of 16 frames of 65 tokens takes 8 KiB."""

START_FRAMES = 1024
"""Frames of a world's starting context."""

PICTURE_SIDE = 1024
"""Pixels, or tokens, along a side of a world's frame."""

FRAMES_PER_SECOND = 120
"""Frames per second of a world."""

BUTTONS = 32
"""Buttons of a world's player."""

ACTIONS = 256
"""Actions of a world's player."""

TEMPERATURE = 10.0
"""Largest temperature of a draw; codes are nearly equally probable there."""

VISITORS = 64
"""Players of one server."""

MESSAGE_BYTES = 4096
"""Bytes of one message of a player's browser; the page's longest message has about 200."""
