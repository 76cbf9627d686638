"""Rule `judge`: judge every actor's outputs of one op_type."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from traceproof import entry
from traceproof.stages.judge import Bench, judge
from traceproof.store import Store

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--cases", type=Path, required=True)
PARSER.add_argument("--manifests", type=Path, nargs="+", required=True)
PARSER.add_argument("--verdicts", type=Path, required=True)
PARSER.add_argument("--store", type=Path, required=True)
PARSER.add_argument("--code", required=True, help="digest of the code that verdicts depend on")
PARSER.add_argument("--tolerance", type=json.loads, default=None, help="a number, or null")
PARSER.add_argument("--threads", type=int, required=True)
PARSER.add_argument("--log", type=Path, required=True)


def main() -> None:
    """Judge."""
    torch.set_num_threads(options.threads)
    bench = Bench(
        outputs=Store(options.store, "outputs"),
        judged=Store(options.store, "judged"),
        code=options.code,
        tolerance=options.tolerance,
    )
    judge(options.cases, options.manifests, options.verdicts, bench)


if __name__ == "__main__":
    options = PARSER.parse_args()
    entry.run(main, log=options.log)
