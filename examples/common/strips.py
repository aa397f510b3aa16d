"""Rows of frames as PNG pictures."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_LINE, _GAP = 14, 4
_BACKGROUND, _TEXT = (24, 27, 34), (255, 255, 255)


def strip(rows: Mapping[str, np.ndarray], size: tuple[int, int]) -> Image.Image:
    """Return a picture with one labelled row per video uint8 [frames, height, width, 3].

    Args:
        size: width and height of a frame in the picture.
    """
    width, height = size
    longest = max(len(video) for video in rows.values())
    pitch = _LINE + height + _GAP
    image = Image.new("RGB", (longest * (width + _GAP) + _GAP, len(rows) * pitch + _GAP), _BACKGROUND)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default_imagefont()
    for row, (name, video) in enumerate(rows.items()):
        draw.text((_GAP, row * pitch + _GAP), name, fill=_TEXT, font=font)
        for column, frame in enumerate(video):
            shown = Image.fromarray(frame).resize((size), Image.Resampling.NEAREST)
            image.paste(shown, (column * (width + _GAP) + _GAP, row * pitch + _GAP + _LINE))
    return image


def write_strip(rows: Mapping[str, np.ndarray], size: tuple[int, int], path: Path) -> None:
    """Write `strip` as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    strip(rows, size).save(path, format="PNG")
