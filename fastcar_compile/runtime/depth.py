"""Several codes of one position, from a small autoregressive head (docs/reference/step_protocol.md)."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from fastcar_compile.errors import InputError, count_text
from fastcar_compile.ir.types import DecoderConfig
from fastcar_compile.runtime.backends.base import Array, Stepper
from fastcar_compile.runtime.inputs import to_numpy

NO_CODE = -1
"""Stands where a code is not chosen yet, and in the columns of codes of a prompt."""


class DepthHead:
    """Chooses the codes of one position after the other, in D decode steps of a decoder of its own.

    Args:
        stepper: of the head. config: its sizes. body: those of the decoder whose hidden states it reads.

    Attributes:
        codes: D, the number of codes of a position.

    Raises:
        InputError: the two decoders do not fit each other.
    """

    def __init__(self, stepper: Stepper, config: DecoderConfig, body: DecoderConfig) -> None:
        check_head(config, body)
        self.codes, self._stepper, self._config, self._body = config.max_seq_len, stepper, config, body
        self._inputs = np.zeros((config.batch_size, 1, *config.input_shape), np.float32)
        self._never = np.full(config.num_layers, np.inf, np.float32)

    def choose(self, hidden: Array, position: int, choose: Callable[..., Array]) -> Array:
        """Return the codes int64 [B, D] of a position.

        Args:
            hidden: float32 [B, H]. choose: of logits float32 [B, V], position and code number: int64 [B].
        """
        given, found = self._inputs[:, 0], np.full((len(hidden), self.codes), NO_CODE, np.int64)
        given[:, : -self.codes] = hidden
        # A step writes its keys and sees no later ones: what the position before left behind is never read.
        for step in range(self.codes):
            given[:, -self.codes :] = found
            result = self._stepper.decode(self._inputs, step, step, self._never)
            found[:, step] = choose(np.array(result.logits[:, 0]), position, step)
        return found

    def next_input(self, codes: Array) -> Array:
        """Return the body's input float32 [B, W] behind a position with these codes."""
        given = np.zeros((len(codes), *self._body.input_shape), np.float32)
        given[:, -self.codes :] = codes  # exact: float32 holds whole numbers up to 2^24
        return given

    def prompt(self, given: Any) -> Any:
        """Return the body's input of a prompt [B, P, W - D], or of a list of prompts [P, W - D]: no token has codes."""
        if isinstance(given, list | tuple):
            return [self._without_codes(to_numpy(part)) for part in cast("Sequence[Any]", given)]
        return self._without_codes(to_numpy(given))

    def _without_codes(self, rows: Array) -> Array:
        return np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, self.codes)], constant_values=NO_CODE)

    def again(self) -> "DepthHead":
        """Return a head of the same weights, for a copy of the session."""
        return DepthHead(self._stepper.again(), self._config, self._body)


def check_head(head: DecoderConfig, body: DecoderConfig) -> None:
    """Raise InputError where a head and a body do not fit each other."""
    codes, hint = head.max_seq_len, "docs/reference/step_protocol.md#a-depth-head says what each of both takes"
    if not head.takes_embeddings or head.vocab_size is None or head.rows is not None:
        raise InputError("the depth head does not take embeddings and give logits, one row a video", hint=hint)
    if not body.takes_embeddings or body.vocab_size is not None:
        raise InputError("a decoder with a depth head takes embeddings and gives hidden states", hint=hint)
    if head.input_shape != (body.hidden_size + codes,):
        what = f"the depth head takes {head.input_shape[0]} columns, but {body.hidden_size} of the hidden state and "
        raise InputError(what + f"{count_text(codes, 'code')} are given", hint=hint)
    if body.input_shape[0] <= codes:
        raise InputError(f"the decoder's input has no columns besides {count_text(codes, 'code')}", hint=hint)
    if head.batch_size != body.batch_size:
        what = f"the depth head has batch size {head.batch_size}, the decoder {body.batch_size}"
        raise InputError(what, hint="compile both with the same batch_size")
