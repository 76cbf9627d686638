"""The command line. Exit codes: 0 fine, 1 findings, 2 bad use or input, 130 interrupted."""

import gc
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from traceproof.errors import readable
from traceproof.run.entry import INTERRUPTED

BAD_USE = 2
STOPPED = "Stopped.\n"
HELP = "Proves LLM kernel references right. Exit codes: 0 fine, 1 findings, 2 bad use or input, 130 interrupted."
# command -> module with a function of that name; `_command` is added where the name is taken.
COMMANDS = {
    "verify": "verify",
    "doctor": "verify",
    "judge": "judge",
    "check-certificate": "judge",
    "show": "results",
    "tactics": "tactics",
    "diff": "results",
    "site": "results",
    "clean": "results",
    "clone-repos": "sources",
    "dependents": "sources",
    "bisect": "sources",
    "lint": "lint",
    "lint-kernels": "lint",
    "extract-kernel-definitions": "extract",
    "add-new-model": "extract",
    "add-reference-tests": "add_reference_tests",
    "audit-tests": "lint",
    "coverage": "lint",
    "publish": "publish",
}
# Options that take several values after one flag, with a pattern of further values: `--test-sizes small rmsnorm`
# has one size.
ANY, CODE = ".*", r"[A-Z]{2}\d*(,[A-Z]{2}\d*)*"
MANY = {
    "--test-sizes": "small|medium|large|stress",
    "--case": r"[a-z]+-[\w-]+",
    "--select": CODE,
    "--ignore": CODE,
    **dict.fromkeys(("--op-type", "--definition-name", "--changed"), ANY),
    **dict.fromkeys(("--model-name", "--tp", "--ep", "--page-size"), ANY),
}


def command_line(arguments: Sequence[str]) -> typer.Typer:
    """The app with all commands, or only with the one that the arguments begin with: others are not imported."""
    app = typer.Typer(name="traceproof", no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback(help=HELP)(lambda: None)  # else typer takes a single command's name for its argument
    for name in [name for name in arguments[:1] if name in COMMANDS] or COMMANDS:
        function = name.replace("-", "_")
        module = import_module(f"{__name__}.{COMMANDS[name]}")
        app.command(name)(getattr(module, f"{function}_command", None) or getattr(module, function))
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command, then always raise SystemExit with the exit code."""
    ours, snakemakes = list(sys.argv[1:] if arguments is None else arguments), []
    if "--" in ours and ours[0] == "verify":  # arguments behind it are Snakemake's
        place = ours.index("--")
        ours, snakemakes = ours[:place], ours[place + 1 :]
    app = command_line(ours)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # until here, everything is imported
    try:
        app(spread(ours), obj=snakemakes)
    except KeyboardInterrupt:
        sys.stderr.write(STOPPED)
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:
            sys.stderr.write(STOPPED)
        raise
    except Exception as error:
        message = readable(error)
        if message is None:
            raise
        sys.stderr.write(f"{message}\n")
        raise SystemExit(BAD_USE) from None
    finally:
        gc.freeze()  # else Python collects garbage among all modules' objects at exit, for half a second


def spread(arguments: Sequence[str]) -> list[str]:
    """Arguments with the flag repeated before each of several values, as in `--test-sizes small medium`."""
    result: list[str] = []
    flag = ""
    first = False  # whether the flag has no value yet
    for index, argument in enumerate(arguments):
        if argument == "--":
            return [*result, *arguments[index:]]
        if argument.startswith("-"):
            flag, first = (argument, True) if argument in MANY else ("", False)
        elif flag and not first and re.fullmatch(MANY[flag], argument):
            result.append(flag)
        else:
            flag, first = flag if first else "", False
        result.append(argument)
    return result
