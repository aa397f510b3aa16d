"""From prompts to videos: guidance pairs, frames, pixels and files around a compiled decoder."""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastcar_compile.errors import InputError, count_text, os_errors
from fastcar_compile.runtime.compiled import Artifact
from fastcar_compile.runtime.inputs import to_numpy
from fastcar_compile.runtime.sampling import Sampling
from fastcar_compile.support.packages import needs
from fastcar_compile.support.values import check_function, check_kind, path_of, whole

_FPS = 8


class Video(NamedTuple):
    """A decoded video.

    Attributes:
        tokens: int64 [frames, F], or [frames, F, D] where a position has D codes.
        pixels: uint8 [frames, height, width, 3].
    """

    tokens: NDArray[np.int64]
    pixels: NDArray[np.uint8]

    def __repr__(self) -> str:
        height, width = self.pixels.shape[1:3]
        return f"Video({count_text(len(self.pixels), 'frame')} of {width} x {height})"

    def save(self, path: str | Path, fps: float = _FPS) -> None:
        """Write a file of the kind that its name ends with: .gif, .mp4, .webm or what else imageio writes.

        Args:
            fps: frames per second.

        Raises:
            BackendError: imageio is not installed. InputError: it does not write such files.
            UserError: the file cannot be written.
        """
        file = path_of("the video", path)
        with needs("video"):
            imageio: Any = import_module("imageio.v3")  # its types are partial
        timing: dict[str, Any] = {"duration": 1000 / fps, "loop": 0}
        if file.suffix.lower() not in (".gif", ".webp"):
            timing = {"fps": fps, "macro_block_size": 2}  # by default imageio scales to multiples of 16
        with os_errors("the video cannot be written", file):
            try:
                imageio.imwrite(file, self.pixels, **timing)
            except (ValueError, TypeError) as error:
                text = str(error).partition("\n")[0]
                what = f"imageio writes no such file: {text}"
                raise InputError(what, where=str(file), hint="use .gif or .mp4") from error


class VideoPipeline:
    """Makes videos of prompts.

    With guidance every prompt is decoded beside the blank one, in rows b and b + B / 2. Both may have any lengths where
    the decoder was compiled with `rows=1`.

    Args:
        artifact: of the decoder. depth: of its depth head, where a position has several codes.
        encode: from a prompt, such as a text, to the decoder's input: int64 [P], or float32 [P, W] where it takes
            embeddings, without columns of codes.
        decode: from the tokens of a video, int64 [frames, F] or [frames, F, D], to its pixels, uint8
            [frames, height, width, 3], or floats of 0 to 1.
        blank: the prompt of the unconditional rows.
        backend, threads: as `Artifact.session` takes them.

    Raises:
        InputError: the depth head does not fit. BackendError: the backend cannot run here.
    """

    def __init__(
        self,
        artifact: Artifact,
        encode: Callable[[Any], Any],
        decode: Callable[[NDArray[np.int64]], Any],
        *,
        depth: Artifact | None = None,
        blank: Any = " ",
        backend: str = "cpu",
        threads: int | None = None,
    ) -> None:
        check_function("encode", encode)
        check_function("decode", decode)
        check_kind("artifact", artifact, Artifact, "an artifact, as fc.load returns it")
        self.session = artifact.session(backend, threads=threads, depth=depth)
        self._encode, self._decode, self._blank = encode, decode, blank

    def __call__(
        self, prompts: Sequence[Any], frames: int, sampling: Sampling | None = None, *, progress: bool = True
    ) -> list[Video]:
        """Return a video of each prompt.

        Args:
            prompts: as `encode` takes them, any number. The rows of a call are the decoder's batch size; with guidance
                half of them. What is left of the last call repeats its last prompt.
            frames: of each video. sampling: None is greedy. progress: show a progress bar for each call.

        Raises:
            InputError: a prompt, the number of frames or the sampling does not fit the decoder, or the pixels are none.
        """
        if isinstance(prompts, str) or not len(prompts):
            raise InputError("the prompts are no list of prompts", hint='give several, or ["one"]')
        options = Sampling(temperature=0) if sampling is None else sampling
        rows, paired = self.session.config.batch_size, options.guidance != 1
        if paired and rows % 2:
            what = f"guidance decodes pairs of rows, but batch_size is {rows}"
            raise InputError(what, hint="compile with an even batch_size")
        count = whole("frames", frames, 1) * self.session.config.tokens_per_frame
        rows = rows // 2 if paired else rows
        parts = [prompts[i : i + rows] for i in range(0, len(prompts), rows)]
        return [video for part in parts for video in self._few(part, count, options, progress)]

    def _few(self, prompts: Sequence[Any], count: int, sampling: Sampling, progress: bool) -> Iterator[Video]:
        """Yield the videos of as many prompts as one call decodes, or fewer."""
        paired, config = sampling.guidance != 1, self.session.config
        rows = config.batch_size // 2 if paired else config.batch_size
        given = [to_numpy(self._encode(prompt)) for prompt in prompts]
        given += given[-1:] * (rows - len(given))
        given += [to_numpy(self._encode(self._blank))] * (rows if paired else 0)
        tokens = self.session.generate(given, count, sampling, progress=progress)
        for video in tokens[: len(prompts)]:
            shaped = video.reshape(-1, config.tokens_per_frame, *video.shape[1:])
            yield Video(shaped, self._pixels(shaped))

    def _pixels(self, tokens: NDArray[np.int64]) -> NDArray[np.uint8]:
        pixels = to_numpy(self._decode(tokens))
        if pixels.ndim != 4 or len(pixels) != len(tokens) or pixels.shape[3] != 3:
            what = f"decode returned {pixels.dtype} {list(pixels.shape)} for {count_text(len(tokens), 'frame')}"
            raise InputError(what, hint="return uint8 [frames, height, width, 3]")
        if np.issubdtype(pixels.dtype, np.floating):
            pixels = (pixels.clip(0, 1) * 255).round()
        return pixels.astype(np.uint8)
