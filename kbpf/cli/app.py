# SPDX-License-Identifier: Apache-2.0
"""The entry point: runs a command and turns its errors into exit codes.

Exit codes: 0 success; 1 failure, with one line on stderr; 2 wrong usage; 130 interrupted; 141
(SIGPIPE) if the reader of the output has closed it.

Modules that take time or memory to import (rich, bcc, pyroute2) are imported by the commands that
need them. `kbpf run` does not even import typer; arguments.py says why.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kbpf.cli import streams
from kbpf.errors import KbpfError, describe_unexpected_error

if TYPE_CHECKING:
    from typer import Typer
    from typer.core import TyperGroup


def main() -> None:
    """Runs `kbpf` with the arguments of this process, and exits."""
    streams.set_up()
    sys.exit(call(sys.argv[1:]))


def call(arguments: Sequence[str]) -> int:
    """Runs a command in this process. Returns its exit code."""
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except KbpfError as error:
        streams.print_error(f"kbpf: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        streams.exit_by_sigpipe()
    except OSError as error:
        streams.print_error(f"kbpf: {describe_unexpected_error(error)}")
        return 1
    return code


def _dispatch(arguments: Sequence[str]) -> int:
    try:
        if arguments[:1] == ["run"]:
            _run(arguments[1:])
        else:
            typer_app()(args=list(arguments), prog_name="kbpf")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0


def _run(arguments: Sequence[str]) -> None:
    """Runs `kbpf run` without typer."""
    from kbpf.cli.arguments import prepare

    if (prepared := prepare(arguments)) is not None:
        from kbpf.cli.run import run_agent

        run_agent(*prepared)


def _group_class() -> "type[TyperGroup]":
    """The class of the top-level command. It removes the class of an exception from messages about
    wrong values: typer checks enums with pydantic, which puts it first.
    """
    from typer import BadParameter
    from typer.core import TyperGroup

    class Commands(TyperGroup):
        def invoke(self, ctx: Any) -> Any:
            try:
                return super().invoke(ctx)
            except BadParameter as error:
                error.message = error.message.removeprefix("Value error, ")
                raise

    return Commands


def typer_app() -> "Typer":
    """Builds the application with all commands."""
    import typer

    from kbpf import __version__
    from kbpf.cli import arguments as agent
    from kbpf.cli import (
        check,
        cleanup,
        compile,
        config,
        demo,
        inspect,
        monitor,
        schema,
        simulate,
        sysdump,
        top,
        trace,
        verify,
    )

    app = typer.Typer(
        cls=_group_class(),
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Serve the Kubernetes Services of this node by BPF or IPVS, in place of kube-proxy.",
    )

    def version(value: bool) -> None:
        if value:
            typer.echo(f"kbpf {__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        show: bool = typer.Option(
            False, "--version", callback=version, is_eager=True, help="Show the version and exit."
        ),
    ) -> None:
        pass

    def run(context: typer.Context) -> None:
        _run(context.args)

    app.command(
        "run",
        add_help_option=False,
        help=agent.SUMMARY,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(run)

    app.add_typer(inspect.app, name="inspect")
    app.add_typer(config.app, name="config")
    for name, command in (
        ("check", check.check),
        ("compile", compile.compile_programs),
        ("cleanup", cleanup.cleanup),
        ("trace", trace.trace_connection),
        ("page", inspect.print_page),
        ("diff", simulate.diff),
        ("simulate", simulate.simulate),
        ("sysdump", sysdump.sysdump),
        ("monitor", monitor.monitor),
        ("top", top.top),
        ("demo", demo.demo),
        ("schema", schema.schema),
    ):
        app.command(name)(command)
    app.command("verify", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(verify.verify)
    return app
