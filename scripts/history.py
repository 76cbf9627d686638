"""Rule `history`: replay known bugs of released packages."""

import argparse
import sys
from pathlib import Path

from traceproof.cli.interpreter import say
from traceproof.config.schema import Config
from traceproof.dataset.fetch import Dataset
from traceproof.history.catalogue import chosen
from traceproof.history.releases import RELEASES, Releases
from traceproof.history.replay import Replays, write_report
from traceproof.history.table import summed
from traceproof.run import entry

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--config", type=Config.model_validate_json, required=True, help="JSON, as in config.yaml")
PARSER.add_argument("--dataset", type=Path, required=True)
PARSER.add_argument("--jobs", type=int, required=True, help="op_types at a time")
PARSER.add_argument("--out", type=Path, required=True, help="what came of each")
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Replay them all; a miss is a line of the report and no failure of the rule."""
    folder = options.out.absolute().parent
    config = options.config.model_copy(update={"dataset": Dataset(path=options.dataset.absolute())})
    replays = Replays(Path.cwd(), config, folder, Releases(folder / RELEASES), say)
    outcomes = replays.run(chosen(()), jobs=options.jobs)
    write_report(outcomes, options.out)
    sys.stderr.write(f"{summed(outcomes)}\n")


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
