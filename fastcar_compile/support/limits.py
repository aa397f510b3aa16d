"""How large anything that is read from a file may be. Real files are far below; a file beyond a limit is refused."""

from __future__ import annotations

MIB = 1 << 20

JSON_BYTES = 64 * MIB
"""Of a manifest, a thresholds file, a report or any other JSON file. The manifest of 48 layers has 0.3 MiB."""

GRAPH_BYTES = 256 * MIB
"""Of a graph file."""

JSON_DEPTH = 64
"""Brackets inside brackets. A manifest has 10, a graph file 20."""

TOML_BYTES = 1 * MIB
"""Of a target file or a policy."""

SIGNATURE_BYTES = 16 * MIB
"""Of a signature; a file of an artifact takes about 200 bytes of it."""

KEY_BYTES = 1 * MIB
"""Of a file of keys or certificates."""

CONFIG_BYTES = 4 * MIB
"""Of a model's config.json."""

INDEX_BYTES = 64 * MIB
"""Of the index of a model's shards: a line per tensor."""

TEXT_ERROR = 300
"""Characters of a foreign text, or of a value from a file, that an error repeats."""

MANIFEST_FILES = 20_000
"""Files of one artifact."""

FILE_NAME = 512
"""Characters of the name of an artifact's file."""

LAYERS = 1000
"""Several times the layers of any published decoder."""

ARRAYS_BYTES = 1 << 30
"""Of all arrays of a .npz file, unpacked; of the input of one prefill call."""

TENSORS = 1_000_000
"""Tensors of one file."""

SIZE = 1 << 30
"""Of a dimension, a number of tokens, or a size of a model: no tensor of a decoder has a larger one."""

THREADS = 4096
"""CPU threads of one session."""

EXPANDED_BYTES = 1 << 30
"""Of a stored tensor whose elements are repeated by its strides, beyond the bytes that are in the file."""

PIXELS_BYTES = 64 * MIB
"""Of a world's model that turns tokens into pictures."""

STARTS_BYTES = 64 * MIB
"""Of a world's starting contexts; one of 16 frames of 65 tokens takes 8 KiB."""

START_FRAMES = 1024
"""Frames of a world's starting context."""

PICTURE_SIDE = 1024
"""Pixels, or tokens, along a side of a world's frame."""

FRAMES_PER_SECOND = 120
"""Of a world."""

BUTTONS = 32
"""Buttons of a world's player."""

ACTIONS = 256
"""Actions of a world's player."""

LEAST_TEMPERATURE = 1e-30
"""Of a draw, if it is not 0. Any float32 logit that is divided by it is still a finite float64."""

TEMPERATURE = 10.0
"""Of a draw; codes are nearly equally probable there."""

VISITORS = 64
"""Players of one server."""

MESSAGE_BYTES = 4096
"""Of one message of a player's browser; the longest that its page sends has about 200."""
