"""The command line, a module per command. Exit codes: 0 fine, 1 findings, 2 bad use or input, 130 interrupted."""

import gc
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from traceproof.cli import outputs
from traceproof.errors import TraceproofError
from traceproof.run.entry import INTERRUPTED
from traceproof.text import names

BAD_USE = 2
STOPPED = "Stopped.\n"
# Options that take several values after one flag.
MANY = names(
    "--test-sizes --op-type --definition-name --case --select --ignore --changed --model-name --tp --ep "
    "--page-size"
)

HELP = "Proves LLM kernel references right. Exit codes: 0 fine, 1 findings, 2 bad use or input, 130 interrupted."
# Each is a module's function of that name, with `_command` behind it where that means something else there.
_NAMES = (
    "clone-repos dependents clean diff bisect doctor verify judge show site lint "
    "extract-kernel-definitions add-new-model add-reference-tests audit-tests lint-kernels coverage publish"
)
COMMANDS = tuple(_NAMES.split())
MODULES = {"extract-kernel-definitions": "extract"}  # where the module is called otherwise


def command_line(arguments: Sequence[str]) -> typer.Typer:
    """The commands; where the arguments begin with the name of one, that one alone: others are not imported."""
    app = typer.Typer(name="traceproof", no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback(help=HELP)(lambda: None)  # with one command, too, its name is an argument
    for name in [name for name in arguments[:1] if name in COMMANDS] or COMMANDS:
        function = name.replace("-", "_")
        module = import_module(f"{__name__}.{MODULES.get(name, function)}")
        app.command(name)(getattr(module, f"{function}_command", None) or getattr(module, function))
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Raises SystemExit: always, with the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, behind = _apart(given)
    app = command_line(given)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # all is imported
    try:
        outputs.check(own)
        app(spread(own), obj=behind)
    except KeyboardInterrupt:
        sys.stderr.write(STOPPED)
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:
            sys.stderr.write(STOPPED)
        raise
    except TraceproofError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(BAD_USE) from None
    except OSError as error:
        if error.filename is None:
            raise
        sys.stderr.write(f"{_unusable(error)}\n")
        raise SystemExit(BAD_USE) from None
    finally:
        gc.freeze()  # a program that ends need not look for cycles among its modules' objects: half a second


def _apart(given: list[str]) -> tuple[list[str], list[str]]:
    """A command's own arguments, and those behind `--`, which `verify` hands on to Snakemake."""
    if "--" not in given or given[0] != "verify":
        return given, []
    place = given.index("--")
    return given[:place], given[place + 1 :]


def _unusable(error: OSError) -> str:
    """What is the matter with a file or folder that was named on the command line, or that a command needs."""
    where = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    reason = (error.strerror or "it can not be used").lower()
    return (
        f"{where}: {reason}\nGive a path that exists, is of the right kind, and that this user may read and write."
    )


def spread(arguments: Sequence[str]) -> list[str]:
    """Give each of several values its own flag: `--test-sizes small medium` as the specification writes it."""
    result: list[str] = []
    flag: str | None = None
    fresh = False
    for index, argument in enumerate(arguments):
        if argument == "--":
            return [*result, *arguments[index:]]
        if argument.startswith("-"):
            flag, fresh = (argument, True) if argument in MANY else (None, False)
        elif flag is not None:
            if not fresh:
                result.append(flag)
            fresh = False
        result.append(argument)
    return result
