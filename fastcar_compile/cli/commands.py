"""The commands by name, and what the whole program does: help, version, completion, usage errors.

A command is imported when it is called or listed. Its file reaches the compiler through `fastcar_compile`, which loads
a name when it is first used, or imports it inside of its functions, so that `fastcar --help` starts at once.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.exceptions import TyperException

from fastcar_compile.cli.common import CALL, CommandCall, ExitCode, report_error
from fastcar_compile.errors import UserError
from fastcar_compile.support.packages import Registry

COMMANDS = {
    "compile": "fastcar_compile.cli.compile:compile_command",
    "train-gate": "fastcar_compile.cli.tune:train_gate_command",
    "fit-draft": "fastcar_compile.cli.tune:fit_draft_command",
    "tune-decoder": "fastcar_compile.cli.tune:tune_decoder_command",
    "calibrate": "fastcar_compile.cli.tune:calibrate_command",
    "evaluate": "fastcar_compile.cli.tune:evaluate_command",
    "inspect": "fastcar_compile.cli.inspect:inspect_command",
    "diff": "fastcar_compile.cli.inspect:diff_command",
    "opt": "fastcar_compile.cli.opt:opt_command",
    "run": "fastcar_compile.cli.run:run_command",
    "verify": "fastcar_compile.cli.verify:verify_command",
    "sign": "fastcar_compile.cli.inspect:sign_command",
    "verify-signature": "fastcar_compile.cli.inspect:verify_signature_command",
    "estimate": "fastcar_compile.cli.estimate:estimate_command",
    "hls-report": "fastcar_compile.cli.estimate:hls_report_command",
    "cache": "fastcar_compile.cli.targets:cache_command",
    "targets": "fastcar_compile.cli.targets:targets_command",
    "doctor": "fastcar_compile.cli.targets:doctor_command",
}
REGISTRY = Registry("command", "fastcar_compile.commands", COMMANDS, UserError)
ABSENT = {
    "play": ("is not installed", "in a checkout: pip install ./play"),
    "simulate": ("was removed", "use `fastcar estimate ARTIFACT --time-line FILE`"),
    "explore": ("was removed", "use `fastcar estimate` for speed on a board, and `fastcar evaluate` for quality"),
}
"""Names of no command -> why, unless a plug-in brings it, and what to do."""
REMOVED = {
    **dict.fromkeys(("--executor", "--scratch"), "leave it out: the threads of this machine compute"),
    **dict.fromkeys(("--grid", "--lag", "--lead", "--prefix"), "use --jacobi 8: several positions a step, same tokens"),
}
"""Options that this minor version still knows -> what to do."""


class FastcarCommand(TyperCommand):
    """A command with its options under headings. It tells its function which are given: defaults are values too."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options, and those of every panel under its heading."""
        panels: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for own in self.get_params(ctx):
            heading = "Options" if isinstance(own, TyperOption) else "Arguments"
            if record := own.get_help_record(ctx):
                panels.setdefault(getattr(own, "rich_help_panel", None) or heading, []).append(record)
        for panel, records in ((panel, records) for panel, records in panels.items() if records):
            with formatter.section(panel):
                formatter.write_dl(records)

    def invoke(self, ctx: Any) -> Any:
        """Call the function."""
        sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
        given = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
        flags = {str(own.name): own.opts[0] for own in self.params}
        token = CALL.set(CommandCall(flags, frozenset(given)))
        try:
            return super().invoke(ctx)
        finally:
            CALL.reset(token)


class FastcarGroup(TyperGroup):
    """The commands of `REGISTRY`. Usage errors are reported as the commands report theirs, as JSON with --json."""

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

    @cached_property
    def _plug_ins(self) -> list[str]:
        return sorted({point.name for point in entry_points(group=REGISTRY.group)} - COMMANDS.keys())

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, those of plug-ins last."""
        return [*COMMANDS, *self._plug_ins]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name, None if there is none. One that cannot be imported is a command that says so."""
        if cmd_name in self.commands or (cmd_name not in COMMANDS and cmd_name not in self._plug_ins):
            return self.commands.get(cmd_name)
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        try:
            single.command(cmd_name, cls=FastcarCommand)(REGISTRY.load(cmd_name))
        except UserError as error:
            anything = {"ignore_unknown_options": True, "allow_extra_args": True}
            single.command(cmd_name, help=error.what, context_settings=anything)(_raising(error))
        self.commands[cmd_name] = typer.main.get_command(single)
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of a command line.

        Raises:
            UserError: it is absent; the hint says what to do.
        """
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            if args[0] in ABSENT:
                why, hint = ABSENT[args[0]]
                raise UserError(f"the command `fastcar {args[0]}` {why}", hint=hint)
            for name in self.list_commands(ctx):  # of which typer suggests those that are spelt alike
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)


def _raising(error: UserError) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


def _usage_error(error: TyperException) -> UserError:
    """Return a wrong call as a user error that names the help to read."""
    if (name := getattr(error, "option_name", None)) in REMOVED:
        return UserError(f"the option {name} was removed", hint=REMOVED[name])
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
        "  FASTCAR_CACHE      folder of what commands keep; default: ~/.cache/fastcar_compile\n"
        "  FASTCAR_NO_CACHE   1: builds are not cached\n"
        "  FASTCAR_TRACEBACK  1: show the traceback of an internal error"
    )


app = typer.Typer(
    name="fastcar",
    cls=FastcarGroup,
    epilog=_epilog(),
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: as readable in a pipe as in a terminal, and it starts at once
)


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
