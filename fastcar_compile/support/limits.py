"""How large anything that is read from a file may be. Real files are far below; a file beyond a limit is refused."""

MIB = 1 << 20

JSON_BYTES = 64 * MIB
"""Bytes of a manifest, a thresholds file, a report or any other JSON file. The manifest of 48 layers has 0.3 MiB."""

GRAPH_BYTES = 256 * MIB
"""Bytes of a graph file."""

TOML_BYTES = 1 * MIB
"""Bytes of a target file."""

SIGNATURE_BYTES = 16 * MIB
"""Bytes of a signature; a file of an artifact takes about 200 bytes of it."""

KEY_BYTES = 1 * MIB
"""Bytes of a file of keys."""

CONFIG_BYTES = 4 * MIB
"""Bytes of a model's config.json."""

INDEX_BYTES = 64 * MIB
"""Bytes of the index of a model's shards, which has a line per tensor."""

TEXT_ERROR = 300
"""Characters of a foreign text, or of a value from a file, that an error repeats."""

FILE_NAME = 512
"""Characters of the name of an artifact's file."""

LAYERS = 1000
"""Several times the layers of any published decoder."""

CACHE_BYTES = 20 << 30
"""Bytes that the build cache keeps by itself, and of a file that it takes from a store: a 7B decoder for a board takes
7.3e9."""

ENTRY_BYTES = 4 * MIB
"""Bytes of an entry of the build cache; a file of an artifact takes about 150 bytes of it."""

ARRAYS_BYTES = 1 << 30
"""Bytes of all arrays of a .npz file, unpacked, and of the input of one prefill call."""

TENSORS = 1_000_000
"""Tensors of one file."""

SIZE = 1 << 30
"""A dimension, a number of tokens, or a size of a model: no tensor of a decoder has a larger dimension."""

EXPANDED_BYTES = 1 << 30
"""Bytes of a stored tensor whose elements are repeated by its strides, beyond the bytes that are in the file."""

LEAST_TEMPERATURE = 1e-30
"""Least temperature of a draw that is not 0. Any float32 logit that is divided by it is still a finite float64."""
