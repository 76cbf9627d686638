"""Replaces Snakemake's output by one line per finished job, and failures with their log.

The Snakefile installs it, since a profile with a plugin's name makes a Snakemake that lacks it end with its usage.
With `--verbose`, Snakemake's own output appears instead.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from logging import WARNING, LogRecord
from pathlib import Path
from types import FrameType
from typing import Any

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

KEPT = "What is finished is kept; the same command goes on from there."
DEFAULT = "DefaultStreamHandler"  # name of Snakemake's handler
CLEAR = "\r\x1b[K"  # a job may have left a live line on the terminal
TABLES = "verify_"  # prefix of rules that end with a table
TARGETS = ("chain", "run_tests")  # other such rules
CODE = "TRACEPROOF_FINDINGS"  # variable with the exit code for findings, as Snakemake's 1 is for errors
MIB = 1 << 20
LITTLE = 100  # MiB free on a disk: less may be why a job failed
SHOWN = 3  # failed jobs named in a run's last line
LINTED = "Congratulations, your workflow"  # start of `snakemake --lint` without findings
# Starts of further messages about a job that JOB_ERROR reports.
ECHOES = (
    "RuleException",
    "CalledProcessError",
    "WorkflowError:\nAt least one job did not complete",
    "Exiting because",
)


def install(workflow: Any) -> "LogHandler":  # noqa: ANN401 - Snakemake has no types
    """Replace Snakemake's handler by a new one, which is returned, and handle SIGINT and SIGPIPE.

    With another logger plugin or `--verbose`, Snakemake's handler stays and the new one writes nothing.
    """
    manager = workflow.logger_manager
    handler = LogHandler(manager.settings, None)
    handler.silent = bool(manager.plugin_handlers or manager.settings.verbose)
    handler.remote = bool(workflow.remote_exec)
    for former in list(manager.logger.handlers):
        if former.name == DEFAULT and not handler.silent:
            manager.logger.removeHandler(former)
    manager.logger.addHandler(handler)
    signal.signal(signal.SIGINT, handler.interrupted)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `snakemake | head` ends with its reader, and its jobs with it
    return handler


class LogHandler(LogHandlerBase):
    """Writes Snakemake's events to stderr; Snakemake keeps its full log below .snakemake/log."""

    writes_to_stream = has_filter = has_formatter = True
    writes_to_file = needs_rulegraph = False
    silent = False  # whether another handler writes
    remote = False  # whether this is one job in a batch system, so that the run's process reports the end

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._names: dict[int, str] = {}
        self._finished = ""
        self._stopping = False
        self._full = ""  # text on a failed job's disk, if it is nearly full
        self._failed: dict[str, bool] = {}  # job -> whether only by findings, in order of failure

    def interrupted(self, number: int, frame: FrameType | None) -> None:
        """Report an interrupt, once and at once: jobs end by it too, and Snakemake reports each as an error."""
        if not self._stopping:
            self._stopping = True
            self._write(f"Stopping. {KEPT}")
        signal.default_int_handler(number, frame)

    def end(self) -> None:
        """End a run with failed jobs; the last line names them, unless there are only findings.

        Raises SystemExit: with the exit code, except in a batch system's job.
        """
        from traceproof.run.entry import FINDINGS, INTERRUPTED, UNFINISHED  # may be absent when this is loaded

        if self.remote:
            return
        if self._stopping:
            raise SystemExit(INTERRUPTED)
        others = [name for name, findings in self._failed.items() if not findings]
        if self._failed and not others:
            raise SystemExit(int(os.environ.get(CODE, FINDINGS)))
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        what = f"{', '.join(others[:SHOWN]) or 'see above what'}{more} failed{self._full}"
        self._write(f"The run could not finish: {what}. {KEPT}")
        raise SystemExit(UNFINISHED)

    def emit(self, record: LogRecord) -> None:
        """Write the text for a record, if it has one."""
        text = self._text(record)
        if text and not self.silent:
            self._write(text)

    def _write(self, text: str) -> None:
        sys.stderr.write((CLEAR if sys.stderr.isatty() else "") + text + "\n")
        sys.stderr.flush()

    def _text(self, record: LogRecord) -> str:  # noqa: PLR0911 - one answer per kind of event
        values: Mapping[str, Any] = vars(record)
        if self._stopping:
            return ""
        match getattr(record, "event", None):
            case LogEvent.JOB_INFO:
                return self._announced(values)
            case LogEvent.JOB_FINISHED:
                self._finished = self._names.get(values["job_id"], "")
                self._failed.pop(self._finished, None)  # a retry succeeded
            case LogEvent.PROGRESS:
                return self._progress(values["done"], values["total"])
            case LogEvent.JOB_ERROR | LogEvent.GROUP_ERROR:
                return self._failure(values)
            case LogEvent.SHELLCMD if self.common_settings.printshellcmds:
                return str(values.get("shellcmd") or values.get("cmd") or "")
            case LogEvent.RUN_INFO if self.common_settings.dryrun:
                return record.getMessage()
            case LogEvent.ERROR | None if record.levelno >= WARNING or record.getMessage().startswith(LINTED):
                return "" if record.getMessage().startswith(ECHOES) else record.getMessage()
        return ""

    def _announced(self, values: Mapping[str, Any]) -> str:
        words = [values["rule_name"], *map(str, values["wildcards"].values())]
        name = " ".join(word for word in words if word)
        self._names[values["jobid"]] = name
        if self.common_settings.dryrun:
            return f"would run {name}: {' '.join(str(values['reason']).split())}"
        return str(values["rule_msg"] or "")

    def _progress(self, done: int, total: int) -> str:
        if self._finished.startswith(TABLES):
            return ""
        seconds = time.monotonic() - self._started
        return f"[{done:{len(str(total))}}/{total}] {seconds:5.0f} s  {self._finished}"

    def _failure(self, values: Mapping[str, Any]) -> str:
        if "groupid" in values:  # each of its jobs is reported too
            logs = ", ".join(values["aux_logs"]) or "none, so it was not accepted: too large for any of its nodes?"
            return f"FAILED group {values['groupid']}; the batch system's log: {logs}"
        name = self._names.get(values["jobid"], values["rule_name"])
        rule = name.partition(" ")[0]
        ends_with_table = rule in TARGETS or rule.startswith(TABLES)
        self._failed[name] = ends_with_table and any(map(_found, values["log"]))
        for folder in {Path(log).parent for log in values["log"]}:
            with suppress(OSError):
                free = shutil.disk_usage(folder).free
                self._full = f"; {free / MIB:.1f} MiB are free in {folder}" if free < LITTLE * MIB else ""
        if self._failed[name]:
            return ""
        said = str(values.get("rule_msg") or "")
        # The batch system's message about its job.
        batch = f"{said} " if said and not said.startswith("Error in rule") else ""
        return f"FAILED {name}; {batch}what it said: {', '.join(values['log'])}"


def _found(log: str) -> bool:
    """Whether a job ended with findings, by the end of its log."""
    from traceproof.run.entry import FOUND

    try:
        return Path(log).read_text(encoding="utf-8", errors="replace").endswith(FOUND)
    except OSError:
        return False
