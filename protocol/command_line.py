"""Command lines from typed functions; the only file that imports cyclopts.

A parameter of the function is an argument or an option, its annotation gives type and help, and its docstring is the
help text: `penstock`'s verb, its help and completion, and ``python -m`` of a module come from that one declaration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Argument, CycloptsError, Group, Parameter

from penstock.protocol.errors import PenstockError
from penstock.protocol.process_end import error_text

__all__ = [
    "FLAT", "App", "Group", "Help", "Host", "Json", "Least", "Parameter", "Port", "RunArguments", "RunName",
    "SigningKeys", "UsageError", "application", "arguments_of", "program", "run", "typed",
]  # fmt: skip

USAGE_ERROR = 2  # exit code
FLAT = Parameter(name="*")  # the fields of a dataclass are options of the command
RunArguments = Annotated[str, Parameter(allow_leading_hyphen=True, help="Run files; settings as section.key=value.")]
RunName = Annotated[str, Parameter(help="Name of the run.")]
Json = Annotated[bool, Parameter(help="Print JSON instead of text.")]
Host = Annotated[str, Parameter(help="Address to listen on; default this machine only.")]
Port = Annotated[int, Parameter(help="Port to listen on; 0: any free one.")]
_KEYS = "File with one or two signing keys whsec_..., one per line; requests signed with neither are refused."
SigningKeys = Annotated[Path | None, Parameter(help=_KEYS)]
_typed: ContextVar[Sequence[str] | None] = ContextVar("typed", default=None)


class UsageError(PenstockError):
    """Options that do not go together; exit code 2."""


def Help(text: str, **more: Any) -> Parameter:  # noqa: N802 - an annotation, as Parameter
    return Parameter(help=text, **more)


def Least(least: int) -> Parameter:  # noqa: N802 - an annotation, as Parameter
    def check(_: Any, value: Any) -> None:
        if value is not None and value < least:
            raise ValueError(f"Must be >= {least}.")

    return Parameter(validator=check)


def application(name: str | None = None, **more: Any) -> App:
    """Return an application without commands; a switch has no ``--no-`` form unless its parameter names one."""
    return App(
        name=name, help_format="plaintext", default_parameter=_default_parameter(), **{"version_flags": [], **more}
    )


def arguments_of(app: App) -> list[Argument]:
    """Return the arguments and options of a command, with the names that it takes; none for a list of verbs."""
    if app.default_command is None:
        return []
    return list(app.assemble_argument_collection(default_parameter=_default_parameter()))


def program(name: str, function: Callable[..., int], *, error: int | None = 1) -> Callable[..., int]:
    """Return the ``main`` of a module with one command.

    It takes arguments, those of the process by default, and returns the exit code: ``error`` after a PenstockError,
    which is explained on stderr (None: it is raised), 130 after Ctrl-C.
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        app = application(name)
        app.default(function)
        try:
            return run(app, arguments)
        except PenstockError as err:
            if error is None:
                raise
            sys.stderr.write(error_text(f"{name}: {err}\n"))
            return error
        except KeyboardInterrupt:
            return 130

    return main


def run(app: App, arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code of its function, 2 for wrong usage, which is explained on stderr."""
    tokens = tuple(sys.argv[1:] if arguments is None else arguments)
    before = _typed.set(tokens)
    try:
        _refuse_mistyped(app, tokens)
        return app(tokens, result_action="return_value", exit_on_error=False) or 0
    except CycloptsError:  # it is printed already
        return USAGE_ERROR
    except UsageError as err:
        sys.stderr.write(error_text(f"{app.name[0]}: {err}\n"))
        return USAGE_ERROR
    finally:
        _typed.reset(before)


def _refuse_mistyped(app: App, tokens: Sequence[str]) -> None:
    """Raise UsageError for a word that is nearly an option of a command which takes any words as settings."""
    if not any(token.startswith("--") for token in tokens) or {"--help", "--version"} & set(tokens):
        return
    _, apps, rest = app.parse_commands(tokens)
    arguments = arguments_of(apps[-1])
    if not any(argument.parameter.allow_leading_hyphen for argument in arguments):
        return
    import difflib  # noqa: PLC0415  few commands need it

    options = [name for argument in arguments for name in argument.names if name.startswith("--")]
    for word in (
        raw_token.partition("=")[0]
        for raw_token in rest
        if raw_token.startswith("--") and "." not in raw_token.partition("=")[0]
    ):
        if word not in options and (near := difflib.get_close_matches(word, options, 1, 0.8)):
            raise UsageError(f"there is no option {word}; did you mean {near[0]}?")


def typed() -> Sequence[str]:
    """Return the arguments of the command that is running, as they were typed."""
    words = _typed.get()
    return sys.argv[1:] if words is None else words


def _default_parameter() -> Parameter:
    return Parameter(negative=(), show_default=_shown)


def _shown(default: object) -> str | None:
    return str(default) if default not in (None, (), "", False) or (default == 0 and default is not False) else None
