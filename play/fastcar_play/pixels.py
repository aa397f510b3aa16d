"""From image codes to a picture: the world's pixels.onnx in onnxruntime."""

import re
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.errors import InputError
from fastcar_compile.runtime.guard import thread_count
from fastcar_play import limits
from fastcar_play.world import HINT, PIXELS, World

Picture = NDArray[np.uint8]
"""RGB, uint8 [height, width, 3]."""

_NOWHERE = "/proc/self/no-such-folder"
"""Where onnxruntime looks for weights outside of the model, so that the model reads no file of this machine."""

_REPEATS = re.compile(rb"[\0\4](Loop|Scan)")
"""An operator that may run for ever. ONNX stores a name as its length, 4 or 4 in more bytes, and its letters."""


class Pixels:
    """Makes pictures of image codes. Several threads may use it at once.

    Args:
        threads: CPU threads; None: all usable cores.

    Raises:
        InputError: the model cannot be loaded, or makes something else than frames of this world.
    """

    def __init__(self, world: World, threads: int | None = None) -> None:
        self._image, self._where = world.file.image, str(world.folder / PIXELS)
        if repeats := _REPEATS.search(world.pixels):
            raise self._error(f"has the operator {repeats[1].decode()}, which may never end")
        onnxruntime: Any = import_module("onnxruntime")  # it has no types
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = thread_count(threads)
        options.log_severity_level = 4
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", _NOWHERE)
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # the decoder's step comes next
        try:
            self._session = onnxruntime.InferenceSession(world.pixels, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions share no public base class
            raise self._error("cannot be loaded", error) from error
        self(np.zeros(self._image.tokens, np.int64))

    def __call__(self, codes: NDArray[np.int64]) -> Picture:
        """Return the picture of one frame's image codes, int64 [tokens].

        Raises:
            InputError: the model makes something else.
        """
        try:
            (frames,) = self._session.run(["frames"], {"tokens": codes.reshape(1, *self._image.grid)})
        except Exception as error:  # as above
            raise self._error("cannot be run", error) from error
        shape = (1, *self._image.size, 3)
        if not isinstance(frames, np.ndarray) or frames.dtype != np.uint8 or frames.shape != shape:
            raise self._error(f"does not make uint8 {list(shape)} of one frame")
        return frames[0]

    def _error(self, what: str, error: Exception | None = None) -> InputError:
        reason = "" if error is None else f": {str(error)[: limits.TEXT_ERROR]}"
        return InputError(f"the world's {PIXELS} {what}{reason}", where=self._where, hint=HINT)
