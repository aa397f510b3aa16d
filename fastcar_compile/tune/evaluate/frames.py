"""Frames from tokens, and the similarity of two videos."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastcar_compile.errors import InputError, UserError
from fastcar_compile.support.packages import needs

Detokenize = Callable[[np.ndarray], Any]
"""int64 [N, T], whole frames without the prompt -> [N, frames, height, width] or [N, frames, height, width, channels],
floats from 0 to 1 or uint8 from 0 to 255."""


def entry_point(text: str) -> Detokenize:
    """Return the function that `module:function` or `path/to/file.py:function` names. This runs the module.

    Raises:
        UserError: the module, file or function does not exist.
    """
    module, colon, name = text.rpartition(":")
    if not colon:
        raise UserError(f"{text!r} names no function", hint="give module:function or path/to/file.py:function")
    try:
        loaded = _from_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except Exception as error:  # the code of others
        hint = "put its folder on PYTHONPATH, or give the path of the .py file"
        raise UserError(f"{module} cannot be imported: {error}", where=text, hint=hint) from error
    found = getattr(loaded, name, None)
    if not callable(found):
        raise UserError(f"{module} has no function {name!r}", where=text)
    return found


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def to_frames(detokenize: Detokenize, tokens: np.ndarray, frames: int) -> np.ndarray:
    """Return the frames of tokens int64 [N, T]: float64 [N, frames, height, width, channels] from 0 to 1.

    Raises:
        InputError: the detokeniser gave another shape or other values.
    """
    made = np.asarray(detokenize(tokens))
    if made.ndim not in (4, 5) or made.shape[:2] != (len(tokens), frames):
        what = f"the detokeniser gave {made.dtype} {list(made.shape)} for {len(tokens)} videos of {frames} frames"
        raise InputError(what, hint="give [N, frames, height, width] or [N, frames, height, width, channels]")
    values = made / 255.0 if made.dtype == np.uint8 else made.astype(np.float64)
    if values.size and not (values.min() >= 0 and values.max() <= 1):
        what = f"the detokeniser gave {made.dtype} values from {made.min():g} to {made.max():g}"
        raise InputError(what, hint="give floats from 0 to 1, or uint8 from 0 to 255")
    return values if values.ndim == 5 else values[..., None]


@dataclass(frozen=True)
class Likeness:
    """How like the true frames others are, of each frame: mean squared error, and SSIM; float64 of one shape."""

    errors: np.ndarray
    similarity: np.ndarray

    @property
    def psnr(self) -> float:
        """Peak signal-to-noise ratio in dB over all pixels of all frames; infinity for equal frames."""
        error = float(self.errors.mean())
        return math.inf if error == 0 else -10 * math.log10(error)

    @property
    def ssim(self) -> float:
        """Mean SSIM of the frames."""
        return float(self.similarity.mean())

    def figures(self) -> dict[str, float]:
        """Return PSNR and SSIM by name."""
        return {"psnr": self.psnr, "ssim": self.ssim}

    def of(self, chosen: np.ndarray | tuple[slice, ...]) -> Likeness:
        """Return that of some of the frames."""
        return Likeness(self.errors[chosen], self.similarity[chosen])


def likeness(made: np.ndarray, true: np.ndarray) -> Likeness:
    """Return how like the true videos others are, [N, frames].

    Args:
        made, true: float64 [N, frames, height, width, channels] from 0 to 1.

    Raises:
        InputError, UserError: as `ssim_by_frame`.
    """
    return Likeness(((made - true) ** 2).mean((2, 3, 4)), ssim_by_frame(made, true))


def ssim_by_frame(made: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Return the structural similarity (Wang et al. 2004, by scikit-image, window at most 7), float64 [N, frames].

    Raises:
        InputError: a side of the frames is below three pixels.
        BackendError: scikit-image is not installed.
    """
    with needs("evaluate"):
        from skimage.metrics import structural_similarity
    side = min(7, made.shape[2], made.shape[3])
    if side < 3:
        what = f"frames of {made.shape[2]}x{made.shape[3]} pixels are too small for SSIM"
        raise InputError(what, hint="enlarge them")
    # scikit-image takes odd windows only.
    options: dict[str, Any] = {"win_size": side - 1 + side % 2, "data_range": 1.0, "channel_axis": -1}
    pairs = zip(made.reshape(-1, *made.shape[2:]), true.reshape(-1, *true.shape[2:]), strict=True)
    return np.array([structural_similarity(a, b, **options) for a, b in pairs]).reshape(made.shape[:2])
