"""The tokenizer: a convolutional autoencoder with finite scalar quantisation, 64x64 RGB to 8x8 tokens and back."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vector_quantize_pytorch import FSQ
from world_format import GRID, LEVELS

FINE, COARSE = 64, 128
"""Channels at 16x16 and at 8x8."""

_PATCH = 4
_BATCH = 256


class Block(nn.Module):
    """A residual block of two 3x3 convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(8, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, C, H, W] for [N, C, H, W]."""
        return x + self.body(x)


class PixelDecoder(nn.Module):
    """Quantised vectors [N, 4, 8, 8] to pixels [N, 3, 64, 64] of about 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(len(LEVELS), COARSE, 3, padding=1),
            Block(COARSE),
            Block(COARSE),
            nn.Conv2d(COARSE, FINE * 4, 1),
            nn.PixelShuffle(2),
            Block(FINE),
            Block(FINE),
            nn.Conv2d(FINE, 3 * _PATCH**2, 3, padding=1),
            nn.PixelShuffle(_PATCH),
        )

    def forward(self, codes: Tensor) -> Tensor:
        """Return pixels float [N, 3, 64, 64]."""
        return self.body(codes) + 0.5


class Autoencoder(nn.Module):
    """Encoder, quantiser and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(_PATCH),
            nn.Conv2d(3 * _PATCH**2, FINE, 3, padding=1),
            Block(FINE),
            nn.Conv2d(FINE, COARSE, 3, stride=2, padding=1),
            Block(COARSE),
            Block(COARSE),
            nn.GroupNorm(8, COARSE),
            nn.SiLU(),
            nn.Conv2d(COARSE, len(LEVELS), 1),
        )
        self.quantizer = FSQ(list(LEVELS))
        self.decoder = PixelDecoder()

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the reconstruction of pixels float [N, 3, 64, 64] from 0 to 1."""
        codes, _ = self.quantizer(self.encoder(pixels - 0.5).float())
        return self.decoder(codes)

    @torch.inference_mode()
    def encode(self, frames: np.ndarray) -> np.ndarray:
        """Return image codes int64 [N, 64] of frames uint8 [N, 64, 64, 3], in raster order."""
        parts = []
        for start in range(0, len(frames), _BATCH):
            _, indices = self.quantizer(self.encoder(to_pixels(frames[start : start + _BATCH]) - 0.5))
            parts.append(indices.reshape(-1, GRID * GRID).to(torch.int64).numpy())
        return np.concatenate(parts)

    @torch.inference_mode()
    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return frames uint8 [N, 64, 64, 3] of image codes int64 [N, 64]."""
        parts = []
        for part in torch.from_numpy(codes).reshape(-1, GRID, GRID).split(_BATCH):
            parts.append(to_frames(self.decoder(self.quantizer.indices_to_codes(part))).numpy())
        return np.concatenate(parts)


def to_pixels(frames: np.ndarray) -> Tensor:
    """Return frames uint8 [N, 64, 64, 3] as float32 [N, 3, 64, 64] from 0 to 1."""
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 255


def to_frames(pixels: Tensor) -> Tensor:
    """Return pixels float [N, 3, 64, 64] as uint8 [N, 64, 64, 3], rounded."""
    return (pixels.float().clamp(0, 1) * 255 + 0.5).permute(0, 2, 3, 1).to(torch.uint8)


def load_autoencoder(path: Path) -> Autoencoder:
    """Return the trained autoencoder of a safetensors file, in evaluation mode."""
    model = Autoencoder()
    model.load_state_dict(load_file(path))
    return model.eval()
