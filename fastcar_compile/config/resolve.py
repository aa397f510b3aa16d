"""What nobody asked for is decided here: `resolve` gives each option of the list a value, and says why."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastcar_compile.config.models import Jacobi
from fastcar_compile.config.options import WHOLE_STEP, CompileConfig
from fastcar_compile.config.targets import Target, has_accelerator
from fastcar_compile.errors import CompileError

DEFAULT_TOKENS_PER_FRAME = 256
ASSUMED = "assumed: the model's config gives none"


@dataclass(frozen=True)
class Resolved:
    """The options of a build, and why they are so.

    Args:
        config: every option. whole: the same with whole decode steps on the accelerator, where nobody says what it
            computes: they are tried first. None: target or options exclude them.
        reasons: option that nobody gave -> why it has its value.
    """

    config: CompileConfig
    whole: CompileConfig | None
    reasons: Mapping[str, str]

    @property
    def assumes_frame(self) -> bool:
        """Whether neither the caller nor the model says how many tokens a frame has."""
        return self.reasons.get("tokens_per_frame") == ASSUMED

    def offloading(self, offload: str, why: str) -> "Resolved":
        """Return the options with what the accelerator computes, in the end, and what that implies.

        Whole steps are exact, of int8 keys and values; linears take these keys and values over from them.
        """
        config = self.whole if self.whole is not None and offload == "all" else self.config
        if self.whole is not None and offload == "linears":
            config = self.config.model_copy(update={"offload": offload, "kv": self.whole.kv})
        return replace(self, config=config, whole=None, reasons=_implied(config, {**self.reasons, "offload": why}))


def resolve(options: Mapping[str, Any], board: Target, facts: Mapping[str, Any]) -> Resolved:
    """Return the options of a build with a value for each.

    Args:
        options: every option of the list (`options.asked`); None: it is decided here.
        facts: `tokens_per_frame` and `max_seq_len` as the model says; None: it does not.

    Raises:
        CompileError: an option is not valid, or has no effect on this target.
    """
    found, why = dict(options), dict[str, str]()

    def choose(name: str, value: object, reason: str) -> None:
        if found[name] is None and value is not None:
            found[name], why[name] = value, reason

    fpga = board.kind == "fpga"
    has = f"target {board.name} has {'an' if fpga else 'no'} accelerator"
    choose("max_seq_len", facts["max_seq_len"], "the model's config")
    choose("tokens_per_frame", facts["tokens_per_frame"], "the model's config")
    choose("tokens_per_frame", DEFAULT_TOKENS_PER_FRAME, ASSUMED)
    if isinstance(jacobi := found["jacobi"], Jacobi):
        choose("rows", jacobi.rows, "jacobi needs them")
    choose("quant", "w8a8" if fpga else "none", has)
    if fpga and found["rows"] is not None:
        choose("offload", "all", "the host's part of other steps has one position for all rows")
    _check_target(board, found)
    given = {name: value for name, value in found.items() if value is not None}
    config = CompileConfig(target=board.name, **given)
    whole = whole_step(board, given) if fpga and "offload" not in given else None
    left = {"rows": "all videos are at one position", **dict.fromkeys(WHOLE_STEP, "")}
    left |= {"offload": "the other options exclude whole steps", "engine": "one kernel"} if fpga else {}
    left |= {} if fpga else dict.fromkeys(("offload", "engine"), has)
    return Resolved(config, whole, _implied(config, {name: left[name] for name in left.keys() - given.keys()} | why))


def _implied(config: CompileConfig, why: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons with those of what offload "all" implies, and of what "linears" take over from it."""
    own = {
        name: f"offload {config.offload} has it" if getattr(config, name) == value else f"nothing asks for {value}"
        for name, value in WHOLE_STEP.items()
        if name in why
    }
    return {**why, **own}


def whole_step(board: Target, options: Mapping[str, Any]) -> CompileConfig | None:
    """Return the options with offload "all"; None: the target has no such accelerator, or the options exclude it.

    `compile` tries these options, and `estimate` predicts them, where the caller gives no `offload`.
    """
    try:
        config = CompileConfig(target=board.name, **options, offload="all")
    except CompileError:
        return None
    return config if has_accelerator(config, board) else None


def _check_target(board: Target, options: Mapping[str, Any]) -> None:
    offload = options["offload"]
    if board.kind == "fpga":
        if options["rows"] is not None and offload != "all":
            what = f"rows with positions of their own need whole decode steps on the accelerator, not {offload=!r}"
            raise CompileError(what, hint='give offload="all", or leave rows out: then all rows are at one position')
        return
    for name in (name for name in ("offload", "engine") if options[name] is not None):
        what = f"{name}={options[name]!r} needs an accelerator, and target {board.name} has none"
        raise CompileError(what, hint=f"choose a board, such as target='zcu102', or leave {name} out")
