"""Videos as PNG strips and GIFs: palette images, enlarged without interpolation. Equal input gives equal bytes."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from video import SIZE

EMPTY, INK, MISSING, EXTRA = range(4)
"""Pixel values: 0 and 1 of a video, and the two differences of a second video from a first one."""

_GAP, _TEXT = 4, 5
_COLOURS = ((24, 27, 34), (240, 240, 235), (226, 86, 70), (64, 156, 255), (96, 102, 114), (255, 255, 255))
_LINE = 14
_MARGIN = 4


def difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the difference of two videos uint8 [frames, 32, 32] of 0 and 1.

    Returns:
        uint8 [frames, 32, 32]: EMPTY or INK where they agree, MISSING (red) for ink only in the first,
        EXTRA (blue) for ink only in the second.
    """
    return np.where(first == second, first, np.where(first > second, MISSING, EXTRA)).astype(np.uint8)


def strip(rows: Mapping[str, np.ndarray], reference: str | None = None, scale: int = 4) -> Image.Image:
    """Return a picture with one labelled row of frames per video.

    Args:
        rows: label -> uint8 [frames, 32, 32] with values 0-3, all of one length.
        reference: a label of `rows`; every other row is followed by its `difference` from that one.
        scale: screen pixels per pixel.

    Raises:
        ValueError: there is no row, or a video has another shape, another length, or values over 3.
    """
    _check(rows)
    if reference is not None:
        rows = _with_differences(rows, reference)
    side = SIZE * scale
    pitch = _LINE + side + _MARGIN
    frames = len(next(iter(rows.values())))
    canvas = np.full((len(rows) * pitch + _MARGIN, frames * (side + _MARGIN) + _MARGIN), _GAP, np.uint8)
    for row, video in enumerate(rows.values()):
        top = row * pitch + _MARGIN + _LINE
        for index, frame in enumerate(_enlarge(video, scale)):
            left = index * (side + _MARGIN) + _MARGIN
            canvas[top : top + side, left : left + side] = frame
    image = _image(canvas)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default_imagefont()
    for row, name in enumerate(rows):
        draw.text((_MARGIN, row * pitch + _MARGIN), name, fill=_TEXT, font=font)
    return image


def write_strip(rows: Mapping[str, np.ndarray], path: Path, reference: str | None = None, scale: int = 4) -> None:
    """Write `strip` as a PNG."""
    strip(rows, reference, scale).save(path, format="PNG")


def write_gif(video: np.ndarray, path: Path, scale: int = 8, frame_ms: int = 250) -> None:
    """Write a video uint8 [frames, 32, 32] as an endless GIF of `frame_ms` milliseconds per frame.

    Raises:
        ValueError: the video has another shape or values over 3.
    """
    _check({"video": video})
    first, *rest = [_image(frame) for frame in _enlarge(video, scale)]
    first.save(path, format="GIF", save_all=True, append_images=rest, duration=frame_ms, loop=0, optimize=False)


def _check(videos: Mapping[str, np.ndarray]) -> None:
    shapes = {name: video.shape for name, video in videos.items()}
    if len(set(shapes.values())) != 1 or next(iter(shapes.values()))[1:] != (SIZE, SIZE):
        raise ValueError(f"videos of one shape [frames, {SIZE}, {SIZE}] are needed, found {shapes}")
    if any(video.max(initial=0) > EXTRA for video in videos.values()):
        raise ValueError(f"pixel values are 0 to {EXTRA}")


def _with_differences(rows: Mapping[str, np.ndarray], reference: str) -> dict[str, np.ndarray]:
    result = {}
    for name, video in rows.items():
        result[name] = video
        if name != reference:
            result[f"{name} against {reference} (red: missing, blue: extra)"] = difference(rows[reference], video)
    return result


def _enlarge(video: np.ndarray, scale: int) -> np.ndarray:
    return video.repeat(scale, 1).repeat(scale, 2)


def _image(canvas: np.ndarray) -> Image.Image:
    image = Image.frombytes("P", (canvas.shape[1], canvas.shape[0]), canvas.tobytes())
    image.putpalette([channel for colour in _COLOURS for channel in colour])
    return image
