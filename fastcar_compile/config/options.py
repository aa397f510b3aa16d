"""The list of options: all that shapes an artifact besides the model, each once. Whatever else knows them reads it."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, TypedDict

from pydantic import Field, model_validator

from fastcar_compile.config.formats import ACCELERATED, KV_TYPES, QUANT_FORMATS, quant_format
from fastcar_compile.config.listing import Listed, Listing, listed, one_of
from fastcar_compile.config.models import Config, Jacobi, ReplayConfig, SparseAttention
from fastcar_compile.errors import CompileError
from fastcar_compile.support import limits

SMALLEST_CHUNK, LARGEST_CHUNK = 64, 256
"""Tokens of a prefill chunk by default. Measured: a chunk of 256 takes a fifth less time per token
than a chunk of 64, and a chunk of 512 takes no less."""

DECODER, DECODING, NUMBERS = Listing("Decoder"), Listing("Decoding"), Listing("Numbers", decided=True)
EXPERT = Listing("Decoding", expert=True)


REMOVED = {"wavefront": "use jacobi: several positions in a decode step, with the tokens of sequential decoding"}
"""Options that this minor version still knows -> what does their work now."""

WHOLE_STEP = {"kv": "int8", "numerics": "exact"}
"""What offload "all" implies where it is left open, and needs."""


class CompileConfig(Config):
    """Everything that shapes a compiled artifact besides the model itself.

    `compile` and `fastcar compile` have these options, `compile` decides what nobody gives: the defaults of `quant`,
    `offload`, `kv` and `numerics` below are its own. The constructor takes "none", "mlp", "float32" and "native".

    Args:
        target: name of the target; see `fastcar targets`.
        tokens_per_frame: tokens of one frame; default: the model's config. It is the distance of a token from its
            counterpart in the previous frame. Where the config has none, it is 256, with a warning.
        max_seq_len: positions of a sequence, in tokens; default: the model's config. Without sparse attention the KV
            cache has as many rows.
        batch_size: videos decoded together. With their rows at most 32 (the width of the DRS Index Register).
        rows: rows of each video, each at a position of its own; default: as `jacobi` needs, else one position. They
            are for `Jacobi` and `Batcher`. None: a row of each video, all at one position. On a board,
            offload is "all" with them.
        jacobi: decode so many positions at once, or auto: the same tokens, sooner. In Python a `Jacobi`; None: one
            position after the other. `rows` is its window, by default, and 8 for "auto".
        replay: when MLPs replay. None compiles a dense decoder. Without thresholds, the gate's default holds, with a
            warning: `calibrate` chooses thresholds. `compile` takes ReplayConfig() by default, the constructor None.
        prefill_chunk: tokens per call of the prefill; default: 64, or an equal part of a frame. Where a frame has more
            than 64 tokens, the part has at most 256, so that frames as a prompt need no padding.
        sparse_attention: attention sinks and a sliding window over a bounded KV cache. None: all positions are seen.
        quant: numbers of the weights: none (float32), bf16, fp16, w8a8 or w4a8; default: w8a8 where the target has an
            accelerator. "none" is the default elsewhere. "bf16" and "fp16" have bfloat16 or float16 weights and float32
            sums; with "bf16" some CPUs round more than eight rows, as of a prompt, to bfloat16. "w4a8" has int4 weights
            in groups of 128.
        kv: keys and values as float32, float16, bfloat16, int8; default: int8 with whole steps, else float32.
            "float16": half the bytes, values rounded half to even and at most ±65504; "bfloat16": half the bytes too,
            for larger values, with an eighth of the precision; "int8": a quarter, 32 values of a head sharing an
            exponent. Linears on the accelerator by default come with "int8" too.
        numerics: attention and norms as native, or exact: equal bits on every backend. "native": attention,
            norms and rotary positions are float32, summed in each backend's own order. "exact": they are defined bit
            for bit too, so that logits and decisions are equal on every backend that has exact numerics, for every
            number of threads and in prefill; needs quant "w8a8" or "w4a8", and kv "int8" (docs/reference/numerics.md).
            Default: "native", and "exact" with whole steps.
        offload: what the accelerator computes: mlp; linears (projections and head too); all (whole steps); default:
            the fastest. "all" is one launch per token, with kv "int8" and numerics "exact", which it implies. Default:
            "all" where it can, unless kv or numerics say otherwise or the hardware model predicts a shorter dense step
            for "linears"; where it cannot, "mlp", with a warning that gives the reasons.
        engine: the accelerator's linears and MLPs: hls (in its one kernel), or rtl (a kernel of their own). The kernel
            of their own (docs/explanation/accelerator.md#the-rtl) has no drafts.

    Raises:
        CompileError: a field is not valid, tokens_per_frame >= max_seq_len, or exact numerics or offload "all" of other
            types.
    """

    target: str
    tokens_per_frame: Annotated[int, Field(ge=1, le=limits.SIZE, strict=True), DECODER]
    max_seq_len: Annotated[int, Field(ge=2, le=limits.SIZE, strict=True), DECODER]
    batch_size: Annotated[int, Field(ge=1, le=32, strict=True), DECODER] = 1
    quant: Annotated[str, one_of(QUANT_FORMATS, "quantisation"), NUMBERS] = "none"
    rows: Annotated[int | None, Field(ge=1, le=32, strict=True), DECODING] = None
    jacobi: Annotated[Jacobi | None, DECODING] = None
    replay: Annotated[ReplayConfig | None, Listing("Replay")] = None
    prefill_chunk: Annotated[int | None, Field(ge=1, le=limits.SIZE, strict=True), EXPERT] = None
    offload: Annotated[Literal["mlp", "linears", "all"], Listing("Board", decided=True)] = "mlp"
    engine: Annotated[Literal["hls", "rtl"], Listing("Board", expert=True, decided=True)] = "hls"
    sparse_attention: Annotated[SparseAttention | None, DECODER] = None
    kv: Annotated[str, one_of(KV_TYPES, "KV type"), NUMBERS] = "float32"
    numerics: Annotated[Literal["native", "exact"], NUMBERS] = "native"

    @property
    def chunk(self) -> int:
        """The tokens per call of the prefill graph."""
        if self.prefill_chunk is not None:
            return self.prefill_chunk
        parts = -(-self.tokens_per_frame // LARGEST_CHUNK)
        return max(SMALLEST_CHUNK, -(-self.tokens_per_frame // parts))

    def __init__(self, **data: Any) -> None:
        """Set what offload "all" implies where it is left open. A manifest may name options that are gone."""
        data = {name: value for name, value in data.items() if name not in REMOVED or value is not None}
        offload = data.get("offload")
        super().__init__(**(WHOLE_STEP | data if isinstance(offload, str) and offload == "all" else data))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens_per_frame >= self.max_seq_len:
            what = f"tokens_per_frame ({self.tokens_per_frame}) is not smaller than max_seq_len ({self.max_seq_len})"
            hint = "lower tokens_per_frame to the tokens of one frame, or raise max_seq_len to at least two frames "
            hint += f"({2 * self.tokens_per_frame})"
            raise CompileError(f"{what}: no token would have a previous frame to replay", hint=hint)
        CompileError.raise_all(self._not_a_whole_step())
        if self.jacobi is not None:
            found = self.jacobi.problems(self.tokens_per_frame, self.rows)
            CompileError.raise_all([CompileError(p.what, where="jacobi", hint=p.hint) for p in found])
        if self.numerics == "exact" and not (quant_format(self.quant).integer and self.kv == "int8"):
            what = f"numerics='exact' is defined for integers, not for quant={self.quant!r} and kv={self.kv!r}"
            hint = "use quant='w8a8' or quant='w4a8' with kv='int8', or numerics='native'"
            raise CompileError(what, hint=hint)
        if self.batch_size * (self.rows or 1) > 32:
            what = f"batch_size {self.batch_size} and rows {self.rows} are {self.batch_size * (self.rows or 1)} rows"
            raise CompileError(what, hint="a decode step has at most 32 (the width of the DRS Index Register)")
        if self.replay is not None and self.replay.couple_cfg and self.batch_size % 2:
            what = f"couple_cfg pairs row b with row b + batch_size / 2, but batch_size is {self.batch_size}"
            hint = "use an even batch_size, or couple_cfg=False"
            raise CompileError(what, hint=hint)
        return self

    def _not_a_whole_step(self) -> list[CompileError]:
        """Return why offload "all" is not possible with the other options."""
        if self.offload != "all":
            return []
        found = [
            CompileError(f"offload='all' needs {name}={wanted!r}, not {given!r}", hint=f"leave {name} out")
            for name, wanted in WHOLE_STEP.items()
            if (given := getattr(self, name)) != wanted
        ]
        if not quant_format(self.quant).integer:
            what = f"offload='all' needs integer weights, not quant={self.quant!r}"
            found.append(CompileError(what, hint=f"use {' or '.join(f'quant={name!r}' for name in ACCELERATED)}"))
        return found


PARTS: dict[str, type[Any]] = {"replay": ReplayConfig, "sparse_attention": SparseAttention}
"""Options of the list that are several ones of the command."""


def option_words() -> Iterator[tuple[str, Listed, Listed]]:
    """Yield the list as the command has it: a parameter, the field of CompileConfig, and the option that this holds."""
    for field in listed(CompileConfig):
        for part in listed(PARTS[field.name]) if field.name in PARTS else (field,):
            if field.name != "target":
                yield part.listing.word or part.name, field, part


class CompileOptions(TypedDict, total=False):
    """The types of the list, as `compile` takes them; None: target and model decide. A test holds it to the list."""

    tokens_per_frame: int | None
    max_seq_len: int | None
    batch_size: int
    rows: int | None
    jacobi: Jacobi | None
    replay: ReplayConfig | None
    prefill_chunk: int | None
    sparse_attention: SparseAttention | None
    quant: str | None
    kv: str | None
    numerics: str | None
    offload: str | None
    engine: str | None


def asked(options: CompileOptions) -> dict[str, Any]:
    """Return every option of `compile`: as given, or its default; None: target and model decide.

    Raises:
        CompileError: an option was removed; the hint names its successor.
    """
    gone = [CompileError(f"the option {name} was removed", hint=REMOVED[name]) for name in REMOVED.keys() & options]
    CompileError.raise_all(gone)
    left = {option.name: None if option.listing.decided else option.default for option in listed(CompileConfig)}
    return {name: value for name, value in left.items() if name != "target"} | {"replay": ReplayConfig()} | options
