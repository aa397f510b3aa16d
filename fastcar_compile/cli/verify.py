"""`fastcar verify`: every backend against eager PyTorch, teacher-forced on the same random inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from typer import Option

import fastcar_compile as fc
from fastcar_compile.cli.common import ExitCode, JsonOption, command, stages
from fastcar_compile.cli.inspect import DigestOption, KeyOption
from fastcar_compile.cli.options import ArtifactArgument, ThresholdOption, parse_thresholds
from fastcar_compile.cli.output import print_result, print_table, print_text
from fastcar_compile.errors import UserError, count_text

if TYPE_CHECKING:
    from fastcar_compile.ir.types import DecoderConfig
    from fastcar_compile.runtime.backends.base import OpenStepper

REFERENCE = "eager"
ROUNDING_MARGIN = 2.0
"""What a backend may differ by, over what the reference itself differs by after a change in the last place."""


@dataclass(frozen=True)
class Trace:
    """One teacher-forced decode: logits float32 [1 + N, B, V] (prompt first), decisions bool [N, L, B]."""

    logits: NDArray[np.float32]
    decisions: NDArray[np.bool_]
    replay_ratio: float


@dataclass(frozen=True)
class Verification:
    """One backend against eager. Steps count decode forwards from 0; -1 is the prompt; None: no mismatch."""

    backend: str
    max_abs_error: float
    token_mismatches: int
    decision_mismatches: int
    first_mismatch: int | None
    replay_ratio: float
    ok: bool


@dataclass(frozen=True)
class Allowed:
    """The largest |logit difference| that is allowed.

    Attributes:
        tolerance: of the quantisation format, or as the user gave it.
        rounding: what the reference differs by when its float32 vectors move by one unit in the last place; None: not
            measured, as every backend kept the tolerance or the user gave one.
    """

    tolerance: float
    rounding: float | None = None

    @property
    def limit(self) -> float:
        """The tolerance, or what rounding explains where that is more."""
        return max(self.tolerance, ROUNDING_MARGIN * (self.rounding or 0.0))


@command
def verify_command(
    artifact: ArtifactArgument,
    backends: str | None = None,
    tokens: Annotated[int | None, Option(min=1)] = None,
    tolerance: Annotated[float | None, Option(min=0.0)] = None,
    threshold: ThresholdOption = None,
    seed: int = 0,
    digest: DigestOption = None,
    public_key: KeyOption = None,
    as_json: JsonOption = False,
) -> ExitCode:
    """Compare every backend with eager PyTorch.

    Every backend decodes the same random inputs. The exit code is 1 if one is out of tolerance or decides differently.

    Args:
        backends: Backends, separated by commas; default: all that the artifact has.
        tokens: Decode steps; default: two frames.
        tolerance: Largest allowed |logit difference|; default: 1e-3, quantised 5e-2 or twice what a change of the
            reference in the last place gives.
        seed: Of the random inputs.
    """
    from fastcar_compile.config.formats import quant_format

    names = None if backends is None else _names(backends)
    limits = None if threshold is None else parse_thresholds(threshold)
    with stages(as_json, "verify", "checking the files") as show:
        loaded = fc.load(artifact, digest=digest, require_signature=public_key)
        sizes, kind = loaded.config, quant_format(loaded.manifest.options.quant)
        names = names or ["cpu", "onnxruntime", *(["hls-csim"] if loaded.manifest.accelerator else [])]
        require_backends(names)
        inputs = random_inputs(sizes, steps_for(sizes, tokens), seed)
        traces = {name: _trace(loaded, name, limits, inputs, show) for name in [REFERENCE, *names]}
        reference = traces.pop(REFERENCE)
        allowed = Allowed(kind.tolerance if tolerance is None else tolerance)
        results = [compare(name, reference, trace, allowed.tolerance) for name, trace in traces.items()]
        beyond = any(result.max_abs_error > allowed.tolerance for result in results)
        if beyond and tolerance is None and kind.integer:
            from fastcar_compile.runtime.backends.eager import open_perturbed

            show("measuring what rounding explains")
            perturbed = _trace(loaded, open_perturbed, limits, inputs, show)
            allowed = Allowed(allowed.tolerance, rounding_error(reference, perturbed))
            results = [compare(name, reference, trace, allowed.limit) for name, trace in traces.items()]
    (rows, length), ok = inputs.shape[:2], all(result.ok for result in results)
    facts = {"steps": length - 1, "rows": rows, "seed": seed, "ok": ok, "results": results}
    print_result(as_json, facts | dataclasses.asdict(allowed), lambda: _show(results, length - 1, rows, allowed))
    return ExitCode.OK if ok else ExitCode.MISMATCH


def rounding_error(reference: Trace, perturbed: Trace) -> float:
    """Return the largest difference of logits before the first step whose decisions differ: replay adds its own."""
    flipped = (reference.decisions != perturbed.decisions).reshape(len(reference.decisions), -1).any(1)
    steps = int(flipped.argmax()) if flipped.any() else len(flipped)
    return float(np.abs(reference.logits - perturbed.logits)[: 1 + steps].max())


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UserError(f"no backend in {text!r}", hint="for example --backends cpu,onnxruntime")
    return names


def require_backends(names: Sequence[str]) -> None:
    """Raise BackendError where a backend, its package or its tool is missing, before another one decodes."""
    from fastcar_compile.runtime.backends import BACKENDS

    for name in names:
        BACKENDS.load(name)
    if "hls-csim" in names:
        from fastcar_compile.runtime.backends.hls_csim import ap_types_folder, compiler

        ap_types_folder()
        compiler()


def steps_for(sizes: DecoderConfig, tokens: int | None) -> int:
    """Return the decode steps to run: as asked, else two frames, or what the cache holds after a prompt of one token.

    Raises:
        UserError: more were asked for than the cache holds.
    """
    most = sizes.max_seq_len - 1
    if tokens is None:
        return min(2 * sizes.tokens_per_frame, most)
    if tokens > most:
        what = f"{tokens} decode steps after a prompt of 1 token do not fit max_seq_len {sizes.max_seq_len}"
        raise UserError(what, where="--tokens", hint=f"give at most {most}")
    return tokens


def random_inputs(sizes: DecoderConfig, steps: int, seed: int) -> NDArray[Any]:
    """Return seeded inputs, the prompt's one token first: int64 [B, 1 + steps], headless float32 [B, 1 + steps, H].

    Raises:
        UserError: the manifest does not state the vocabulary or the hidden size.
    """
    generator, shape = np.random.default_rng(seed), (sizes.batch_size, 1 + steps)
    if sizes.takes_embeddings:
        return generator.standard_normal((*shape, *sizes.input_shape), np.float32)
    if sizes.vocab_size is None:
        what = "the manifest states no vocab_size, so no tokens can be drawn"
        raise UserError(what, hint="compile the model again")
    return generator.integers(min(sizes.vocab_size, sizes.token_ids or sizes.vocab_size), size=shape, dtype=np.int64)


Limits = float | list[float | None] | None


def _trace(
    loaded: fc.Artifact, backend: str | OpenStepper, limits: Limits, inputs: NDArray[Any], show: Callable[[str], None]
) -> Trace:
    name = backend if isinstance(backend, str) else "perturbed reference"
    show(f"opening the {name}")
    session = loaded.session(backend=backend, record=True, threads=None)
    if limits is not None:
        session.set_threshold(limits)
    if (context := loaded.config.context) is not None:
        # What cross-attention reads, float32 [B, L, C], is the same for every backend and seed.
        shape = (len(inputs), context.length, context.size)
        session.set_context(np.random.default_rng(0).standard_normal(shape, np.float32))
    logits = [np.asarray(session.prefill(inputs[:, :1]), np.float32)]
    for step in range(1, inputs.shape[1]):
        show(f"{name}, {step} of {inputs.shape[1] - 1} steps")
        logits.append(np.asarray(session.step(inputs[:, step]), np.float32))
    return Trace(np.stack(logits), np.asarray(session.stats.decisions), float(session.stats.replay_ratio))


def compare(backend: str, reference: Trace, trace: Trace, tolerance: float) -> Verification:
    """Return the largest logit error (NaN counts as infinite), how many tokens and decisions differ, and from where."""
    given, wanted = ([list(item.logits.shape), list(item.decisions.shape)] for item in (trace, reference))
    if given != wanted:
        texts = [f"logits {logits} and decisions {decisions}" for logits, decisions in (given, wanted)]
        what = f"{backend} gives {texts[0]}, {REFERENCE} gives {texts[1]}"
        raise UserError(what, hint="compile the model again")
    with np.errstate(invalid="ignore"):
        apart = np.abs(reference.logits - trace.logits)
        # A model may forbid tokens by -inf: their difference is NaN, and they are equal.
        apart[reference.logits == trace.logits] = 0
    errors = apart.reshape(len(apart), -1).max(1)
    errors = np.where(np.isnan(errors), math.inf, errors)
    differ = (reference.decisions != trace.decisions).reshape(len(trace.decisions), -1).sum(1)
    tokens = (reference.logits.argmax(-1) != trace.logits.argmax(-1)).sum()
    bad = errors > tolerance
    bad[1:] |= differ > 0
    first = int(bad.argmax()) - 1 if bad.any() else None
    counts = int(tokens), int(differ.sum())
    return Verification(backend, float(errors.max()), *counts, first, trace.replay_ratio, ok=first is None)


_TITLES = ("backend", ">max\n|error|", ">tokens\ndiffer", ">decisions\ndiffer", "first\nmismatch", ">replay", "verdict")


def _show(results: list[Verification], steps: int, rows: int, allowed: Allowed) -> None:
    length = f"{count_text(steps, 'step')} of {count_text(rows, 'row')}"
    print_text(f"{length} against {REFERENCE}, tolerance {allowed.tolerance:g}")
    if allowed.rounding is not None:
        text = f"{REFERENCE} with its norms and biases moved in the last place differs by {allowed.rounding:.3g}"
        print_text(f"{text}: {allowed.limit:.3g} is allowed")
    print_text("")
    print_table(_TITLES, map(_cells, results))


def _cells(item: Verification) -> tuple[object, ...]:
    first = {None: "-", -1: "prompt"}.get(item.first_mismatch, f"step {item.first_mismatch}")
    counts = f"{item.max_abs_error:.3g}", item.token_mismatches, item.decision_mismatches
    return item.backend, *counts, first, f"{item.replay_ratio:.2%}", "ok" if item.ok else "MISMATCH"
