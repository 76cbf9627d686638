"""The command line, a module per command. Exit codes: 0 fine, 1 findings, 2 bad use or input, 130 interrupted."""

import sys
from collections.abc import Sequence

import typer

from traceproof.cli import (
    add_new_model,
    add_reference_tests,
    audit_tests,
    bisect,
    clean,
    clone_repos,
    coverage,
    dependents,
    diff,
    doctor,
    extract,
    judge,
    lint,
    lint_kernels,
    outputs,
    publish,
    replay_history,
    show,
    verify,
)
from traceproof.errors import TraceproofError
from traceproof.pipeline.interrupts import INTERRUPTED, MESSAGE

BAD_USE = 2
# Options that take several values after one flag.
MANY = frozenset(
    {
        *("--test-sizes", "--op-type", "--definition-name", "--case", "--select", "--ignore"),
        *("--changed", "--bug"),
        *("--model-name", "--tp", "--ep", "--page-size"),
    }
)

app = typer.Typer(
    name="traceproof",
    help="Proves LLM kernel references right. "
    "Exit codes: 0 fine, 1 findings, 2 bad use or input, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("clone-repos")(clone_repos.clone_repos)
app.command("dependents")(dependents.dependents)
app.command("clean")(clean.clean)
app.command("diff")(diff.diff_command)
app.command("bisect")(bisect.bisect)
app.command("replay-history")(replay_history.replay_history)
app.command("doctor")(doctor.doctor)
app.command("verify")(verify.verify)
app.command("judge")(judge.judge_command)
app.command("show")(show.show)
app.command("lint")(lint.lint_command)
app.command("extract-kernel-definitions")(extract.extract_kernel_definitions)
app.command("add-new-model")(add_new_model.add_new_model)
app.command("add-reference-tests")(add_reference_tests.add_reference_tests)
app.command("audit-tests")(audit_tests.audit_tests)
app.command("lint-kernels")(lint_kernels.lint_kernels_command)
app.command("coverage")(coverage.coverage)
app.command("publish")(publish.publish)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command.

    Raises:
        SystemExit: always, with the exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        outputs.check(given)
        app(spread(given))
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED:
            sys.stderr.write(MESSAGE)
        raise
    except TraceproofError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(BAD_USE) from None
    except OSError as error:
        if error.filename is None:
            raise
        sys.stderr.write(f"{_unusable(error)}\n")
        raise SystemExit(BAD_USE) from None


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
