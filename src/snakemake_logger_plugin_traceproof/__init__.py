"""Snakemake's output for people: one line per finished job, failures with their log, nothing else.

The Snakefile installs it: a profile that names a plugin ends another environment's Snakemake with a page of usage.
`--verbose` gives Snakemake's own output back.
"""

import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from logging import WARNING, LogRecord
from types import FrameType
from typing import Any

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

# What Snakemake says when it is interrupted, in a run and before one.
INTERRUPTED = ("Terminating processes on user request", "Cancelling snakemake on user request")
STOPPING = "Stopping. What is finished is kept; the same command goes on from there."
DEFAULT = "DefaultStreamHandler"  # the name of Snakemake's own
CLEAR = "\r\x1b[K"  # a job may have left a live line on the terminal
AGAIN_SECONDS = 0.05  # after which an interrupt that comes at a bad time is raised
TABLES = "verify_"  # rules of this prefix end with a table of their own
# What Snakemake says beside JOB_ERROR when a job failed.
ECHOES = (
    "RuleException",
    "CalledProcessError",
    "WorkflowError:\nAt least one job did not complete",
    "Exiting because",
)


def install(manager: Any, tell: Callable[[], None]) -> None:  # noqa: ANN401 - Snakemake has no types
    """Write in place of Snakemake's own output, unless another plugin or all details are asked for.

    `tell` is called on an interrupt, before Snakemake hears of it.
    """
    if manager.plugin_handlers or manager.settings.verbose:
        return
    for handler in list(manager.logger.handlers):
        if handler.name == DEFAULT:
            manager.logger.removeHandler(handler)
    handler = LogHandler(manager.settings, None)
    handler.tell = tell
    manager.logger.addHandler(handler)
    signal.signal(signal.SIGINT, handler.interrupted)


def _starts_thread(frame: FrameType | None) -> bool:
    """Whether a pool starts a thread: interrupted there, it forgets the thread and never waits for its job."""
    while frame is not None and frame.f_code is not ThreadPoolExecutor.submit.__code__:
        frame = frame.f_back
    return frame is not None


class LogHandler(LogHandlerBase):
    """Writes to stderr, in place of Snakemake's own output; Snakemake keeps its full log below .snakemake/log."""

    writes_to_stream = has_filter = has_formatter = True
    writes_to_file = needs_rulegraph = False
    tell: Callable[[], None]  # what an interrupt does first

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._names: dict[int, str] = {}
        self._finished = ""
        self._stopping = False

    def interrupted(self, number: int, frame: FrameType | None) -> None:
        """Say at once what an interrupt does: Snakemake may end by the jobs that it stopped before it says so."""
        if not self._stopping:
            self._stopping = True
            sys.stderr.write((CLEAR if sys.stderr.isatty() else "") + STOPPING + "\n")
            self.tell()
        if _starts_thread(frame):
            signal.signal(signal.SIGALRM, self.interrupted)
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        else:
            signal.default_int_handler(number, frame)

    def emit(self, record: LogRecord) -> None:
        """Write what a record has to say, if anything."""
        text = self._text(record)
        if text:
            sys.stderr.write((CLEAR if sys.stderr.isatty() else "") + text + "\n")
            sys.stderr.flush()

    def _text(self, record: LogRecord) -> str:  # noqa: PLR0911 - one answer per kind of event
        values: Mapping[str, Any] = vars(record)
        if self._stopping:  # jobs end by the interrupt, and Snakemake reports each as an error
            return ""
        if record.getMessage().startswith(INTERRUPTED):
            self._stopping = True
            return STOPPING
        match getattr(record, "event", None):
            case LogEvent.JOB_INFO:
                return self._announced(values)
            case LogEvent.JOB_FINISHED:
                self._finished = self._names.get(values["job_id"], "")
            case LogEvent.PROGRESS:
                return self._progress(values["done"], values["total"])
            case LogEvent.JOB_ERROR | LogEvent.GROUP_ERROR:
                return self._failure(values)
            case LogEvent.SHELLCMD if self.common_settings.printshellcmds:
                return str(values.get("shellcmd") or values.get("cmd") or "")
            case LogEvent.RUN_INFO if self.common_settings.dryrun:
                return record.getMessage()
            case LogEvent.ERROR | None if record.levelno >= WARNING:
                return self._complaint(record.getMessage())
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
        if "groupid" in values:  # each of its jobs is told as well
            logs = ", ".join(values["aux_logs"]) or "none, so it was not accepted: too large for any of its nodes?"
            return f"FAILED group {values['groupid']}; the batch system's log: {logs}"
        name = self._names.get(values["jobid"], values["rule_name"])
        if name.startswith(TABLES):
            return ""
        said = str(values.get("rule_msg") or "")
        batch = "" if said.startswith("Error in rule") else f"{said} "  # what a batch system says of its job
        return f"FAILED {name}; {batch}what it said: {', '.join(values['log'])}"

    def _complaint(self, message: str) -> str:
        if message.startswith(ECHOES):
            return ""
        if message.startswith("TraceproofError"):  # for people: the lines of the Snakefile help nobody
            return "\n".join(line for line in message.splitlines()[1:] if not line.startswith("  File "))
        return message
