"""The rules as text: what holds for every one of them; and the last line of a run that fails."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.settings import OutputSettingsLoggerInterface

from snakemake_logger_plugin_traceproof import LogHandler
from traceproof.run.entry import UNFINISHED

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "Snakefile", *sorted((ROOT / "rules").glob("*.smk"))]
COMMAND = re.compile(r"(?m)^ +shell:\n((?: +\".*\"\n)+)")
PLACEHOLDER = re.compile(r"(?<!\{)\{([^{}]+)\}")


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_every_placeholder_of_a_command_is_quoted(file: Path) -> None:
    text = file.read_text()
    commands = COMMAND.findall(text)
    assert len(commands) == text.count("    shell:\n")
    bare = [name for command in commands for name in PLACEHOLDER.findall(command) if not name.endswith(":q")]
    assert bare == []


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_no_rule_asks_for_cores_before_it_runs(file: Path) -> None:
    """A batch system has none to tell: the Snakefile would end with an error there."""
    assert re.findall(r"(?m)^ +threads: .*workflow\.cores", file.read_text()) == []


def test_a_run_that_fails_on_a_full_disk_says_so_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = LogHandler(cast("OutputSettingsLoggerInterface", None), None)
    failure = {"event": LogEvent.JOB_ERROR, "jobid": 1, "rule_name": "cases", "log": [str(tmp_path / "log")]}
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 19))
    handler.emit(logging.makeLogRecord(failure))
    with pytest.raises(SystemExit) as ended:
        handler.end()
    assert ended.value.code == UNFINISHED
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"The run could not finish: cases failed; 0.5 MiB are free in {tmp_path}.")
