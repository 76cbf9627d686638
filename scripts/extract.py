"""Rule `extract`: the configured dataset and the definitions of the configured models, in one folder."""

import argparse
import shutil
import sys
from pathlib import Path

from pydantic import TypeAdapter

from traceproof.config.schema import ModelChoice
from traceproof.extract import pipeline
from traceproof.extract.pipeline import ExtractionSettings
from traceproof.extract.reading import ReaderEnvironment
from traceproof.run import entry

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--models", required=True, help="JSON, as in config.yaml")
PARSER.add_argument("--dataset", type=Path, required=True, help="the configured dataset's folder")
PARSER.add_argument("--stamp", type=Path, required=True, help="<results>/extract/dataset/.fetched.json")
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
    settings = ExtractionSettings(
        environment=ReaderEnvironment(interpreter(options.extract_python)),
        torch_python=interpreter(options.torch_python),
    )
    out = options.stamp.parent
    pipeline.run(choices, settings, dataset=options.dataset, out=out, report=out.parent, say=say)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
