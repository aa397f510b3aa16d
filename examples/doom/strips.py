"""Rows of frames as PNG pictures."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 128, 96
"""Screen pixels of a frame: the frames are stored 1:1 and shown 4:3."""

_LINE, _GAP = 14, 4
_BACKGROUND, _TEXT = (24, 27, 34), (255, 255, 255)


def strip(rows: Mapping[str, np.ndarray]) -> Image.Image:
    """Return a picture with one labelled row per video uint8 [frames, 64, 64, 3]."""
    longest = max(len(video) for video in rows.values())
    pitch = _LINE + HEIGHT + _GAP
    image = Image.new("RGB", (longest * (WIDTH + _GAP) + _GAP, len(rows) * pitch + _GAP), _BACKGROUND)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default_imagefont()
    for row, (name, video) in enumerate(rows.items()):
        draw.text((_GAP, row * pitch + _GAP), name, fill=_TEXT, font=font)
        for column, frame in enumerate(video):
            shown = Image.fromarray(frame).resize((WIDTH, HEIGHT), Image.Resampling.NEAREST)
            image.paste(shown, (column * (WIDTH + _GAP) + _GAP, row * pitch + _GAP + _LINE))
    return image


def write_strip(rows: Mapping[str, np.ndarray], path: Path) -> None:
    """Write `strip` as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    strip(rows).save(path, format="PNG")
