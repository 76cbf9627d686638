"""Would today's cases have caught the bugs that packages really had?

    python lab/replay_history.py --list                    # the catalogue, lab/history/bugs.yaml
    python lab/replay_history.py --bug flashinfer-merge-empty-pair
    python lab/replay_history.py --packages wheels         # releases from a folder of wheels instead of the index

Runs the cases of a bug's op_type on the release with it and on the one without, in the folder whose config.yaml is
to be used. Exit codes: 0 fine, 1 a bug was missed or a release without it fails, 2 bad use or input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from history import replay
from history.catalogue import chosen
from traceproof.cli import BAD_USE, run
from traceproof.errors import TraceproofError

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--bug", nargs="+", action="extend", default=[], help="replay these; all if not given")
PARSER.add_argument("--list", action="store_true", help="list the bugs and replay none")
PARSER.add_argument("--out", type=Path, help="folder for releases, verdicts and replay.json")
PARSER.add_argument("--packages", type=Path, help="a folder of wheels; those nearest the fix are taken")
PARSER.add_argument("--dataset", type=Path, help="a dataset's folder instead of the configured one")
PARSER.add_argument("--test-sizes", nargs="+", help="small medium large")
PARSER.add_argument("--jobs", type=int, default=max(1, run.all_cores() // 4), help="op_types at a time")
PARSER.add_argument("--json", type=Path, help="write the result as JSON; - is stdout")


def main(arguments: list[str] | None = None) -> int:
    """Replay, and print the table."""
    options = PARSER.parse_args(arguments)
    out = Console(file=run.told(options.json))
    try:
        bugs = chosen(options.bug)
        if options.list:
            run.write_result(options.json, {"bugs": [one.model_dump(mode="json") for one in bugs]})
            out.print(replay.listed(bugs))
            return run.FINE
        root, config = run.configured(dataset=run.dataset_in(options.dataset), test_sizes=options.test_sizes)
        folder = (options.out or root / config.results / replay.REPLAYS).absolute()
        wheels = options.packages and options.packages.expanduser().absolute()
        replays = replay.Replays(root, config, folder, replay.Releases(folder / replay.RELEASES, wheels), run.say)
        outcomes = replays.run(bugs, jobs=options.jobs)
        run.write_result(options.json, replay.write_report(outcomes, folder / replay.REPORT))
    except TraceproofError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_USE
    out.print(replay.replayed(bugs, outcomes))
    out.print(replay.summed(outcomes), markup=False, highlight=False, soft_wrap=True)
    return run.FINDINGS if any(one.finding for one in outcomes) else run.FINE


if __name__ == "__main__":
    sys.exit(main())
