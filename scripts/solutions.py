"""Rule `solutions`: judge the dataset's solutions."""

import argparse
from pathlib import Path

from traceproof.cli.interpreter import say
from traceproof.config.schema import Config
from traceproof.pipeline import entry
from traceproof.solutions.session import Session

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--config", type=Config.model_validate_json, required=True, help="JSON, as in config.yaml")
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--judged", type=Path, required=True, help="folder of certificates")
PARSER.add_argument("--hidden-seed", type=int, required=True)
PARSER.add_argument("--out", type=Path, required=True, help="what became of each")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Judge them all; a refused one is a line of the summary and no failure of the rule."""
    session = Session(
        root=Path.cwd(),
        config=options.config,
        out=options.judged.absolute(),
        say=say,
        hidden_seed=options.hidden_seed % (1 << 30) + 1,
        dataset=options.dataset.absolute(),
    )
    session.judge_folder(session.selected(), options.out)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
