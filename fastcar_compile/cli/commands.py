"""The commands by name, and what the whole program does: help, version, completion, usage errors.

A command's file imports the compiler inside of its functions, so that `fastcar --help` starts at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from fastcar_compile.cli.calibrate import calibrate_command
from fastcar_compile.cli.common import ExitCode, report_error
from fastcar_compile.cli.compile import compile_command
from fastcar_compile.cli.diff import diff_command
from fastcar_compile.cli.doctor import doctor_command
from fastcar_compile.cli.estimate import estimate_command
from fastcar_compile.cli.evaluate import evaluate_command
from fastcar_compile.cli.inspect import inspect_command
from fastcar_compile.cli.opt import opt_command
from fastcar_compile.cli.play import play_command
from fastcar_compile.cli.run import run_command
from fastcar_compile.cli.targets import targets_command
from fastcar_compile.cli.train import train_gate_command, tune_decoder_command
from fastcar_compile.cli.trust import sign_command, verify_signature_command
from fastcar_compile.cli.verify import verify_command
from fastcar_compile.errors import UserError

COMMANDS = {
    "compile": compile_command,
    "train-gate": train_gate_command,
    "tune-decoder": tune_decoder_command,
    "calibrate": calibrate_command,
    "evaluate": evaluate_command,
    "inspect": inspect_command,
    "diff": diff_command,
    "opt": opt_command,
    "run": run_command,
    "play": play_command,
    "verify": verify_command,
    "sign": sign_command,
    "verify-signature": verify_signature_command,
    "estimate": estimate_command,
    "targets": targets_command,
    "doctor": doctor_command,
}
REMOVED = {"simulate": "fastcar estimate ARTIFACT --time-line FILE"}
"""Commands that this minor version still names -> what does their work now."""


class FastcarGroup(TyperGroup):
    """Reports usage errors and removed commands as the commands report their errors, as JSON where --json is given."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the words of a command line. In standalone mode, leave with the exit code."""
        words = sys.argv[1:] if args is None else list(args)
        try:
            code: Any = super().main(words, prog_name, complete_var, False, windows_expand_args, **extra)
        except (TyperException, UserError) as error:
            user = error if isinstance(error, UserError) else _usage_error(error)
            code = report_error(user, "--json" in words)
        if not standalone_mode:
            return code
        sys.exit(int(code or 0))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of a command line.

        Raises:
            UserError: it was removed; the hint names its successor.
        """
        if args[0] in REMOVED and not ctx.resilient_parsing:
            raise UserError(f"the command `fastcar {args[0]}` was removed", hint=f"use `{REMOVED[args[0]]}`")
        return super().resolve_command(ctx, args)


def _usage_error(error: TyperException) -> UserError:
    """Return a wrong call as a user error that names the help to read."""
    context = getattr(error, "ctx", None)
    path = "fastcar" if context is None else context.command_path
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    what = text.strip().rstrip(".") or "the call is not complete"
    return UserError(what[:1].lower() + what[1:], hint=f"see `{path} --help`")


def _epilog() -> str:
    codes = "\n".join(f"  {code.value:3}  {code.meaning}" for code in ExitCode)
    return (
        f"\b\nExit codes:\n{codes}\n\n\b\nEnvironment:\n"
        "  NO_COLOR           no colours\n"
        "  FASTCAR_TRACEBACK  1: show the traceback of an internal error"
    )


app = typer.Typer(
    name="fastcar",
    cls=FastcarGroup,
    help="Compile autoregressive video decoders that replay MLP outputs of the previous frame.",
    epilog=_epilog(),
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: as readable in a pipe as in a terminal, and it starts at once
)
for _name, _function in COMMANDS.items():
    app.command(_name)(_function)


def _print_version(wanted: bool) -> None:
    if wanted:
        from fastcar_compile import __version__

        typer.echo(f"fastcar {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def fastcar(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compile autoregressive video decoders that replay MLP outputs of the previous frame."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(int(ExitCode.USER_ERROR))
