"""The `fastcar` command. One file per command; exit codes: 0 ok, 1 mismatch, 2 user error, 3 internal error."""

from __future__ import annotations

import typer

from fastcar_compile.cli.calibrate import calibrate_command
from fastcar_compile.cli.compile import compile_command
from fastcar_compile.cli.estimate import estimate_command
from fastcar_compile.cli.evaluate import evaluate_command
from fastcar_compile.cli.inspect import inspect_command
from fastcar_compile.cli.run import run_command
from fastcar_compile.cli.targets import targets_command
from fastcar_compile.cli.train_gate import train_gate_command
from fastcar_compile.cli.tune_decoder import tune_decoder_command
from fastcar_compile.cli.verify import verify_command

app = typer.Typer(
    name="fastcar",
    help="Compile autoregressive video decoders that replay MLP outputs of the previous frame.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("compile")(compile_command)
app.command("train-gate")(train_gate_command)
app.command("tune-decoder")(tune_decoder_command)
app.command("calibrate")(calibrate_command)
app.command("evaluate")(evaluate_command)
app.command("inspect")(inspect_command)
app.command("run")(run_command)
app.command("verify")(verify_command)
app.command("estimate")(estimate_command)
app.command("targets")(targets_command)


def main() -> None:
    """Entry point of the console script."""
    app()


__all__ = ["app", "main"]
