"""Rule `extract`: the configured dataset and the definitions of the configured models, in one folder."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from pydantic import TypeAdapter

from traceproof.config.schema import ModelChoice
from traceproof.dataset.fetch import FETCHED
from traceproof.extract import stage
from traceproof.extract.pipeline import Settings
from traceproof.extract.reading import Environment
from traceproof.pipeline import entry

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--models", required=True, help="JSON, as in config.yaml")
PARSER.add_argument("--dataset", type=Path, required=True, help="the configured dataset's folder")
PARSER.add_argument("--out", type=Path, required=True)
PARSER.add_argument("--report", type=Path, required=True, help="folder of sharing.md, recall.md and report.json")
PARSER.add_argument("--extract-python", required=True)
PARSER.add_argument("--torch-python", required=True)
PARSER.add_argument("--log", type=Path, required=True)


def interpreter(name: str) -> Path:
    """Its absolute path; links stay, since they tell a virtual environment."""
    return Path(shutil.which(name) or name).absolute()


def say(line: str) -> None:
    """Progress."""
    sys.stderr.write(f"extract    {line}\n")


def main() -> None:
    """Extract."""
    choices = TypeAdapter(tuple[ModelChoice, ...]).validate_json(options.models)
    settings = Settings(
        environment=Environment(interpreter(options.extract_python)),
        torch_python=interpreter(options.torch_python),
    )
    stage.run(choices, settings, dataset=options.dataset, out=options.out, report=options.report, say=say)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log, shared=options.out / FETCHED)
