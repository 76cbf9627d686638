"""The smallest change of temperature that the judge sees in a sampler, by the size of its vocabulary.

    python lab/sampler_power.py --vocabulary 1000 32000 128256 152064

Draws come from the exact distributions of the case that tells temperatures, raised to a power (1 / temperature),
as many as a run plans. Printed per vocabulary: the number of draws, how often the right power is refused, and the
first powers below and above 1 that at least `--share` of the runs refuse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.execution.inputs import make_inputs
from traceproof.judge.sampling import judge_samples
from traceproof.ops import registry
from traceproof.ops.compare import Samples

ROOT = Path(__file__).resolve().parent.parent
CASE = "medium-1"
STEPS = (0.02, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.5)
PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--vocabulary", type=int, nargs="+", default=[1000, 32000, 128256, 152064])
PARSER.add_argument("--runs", type=int, default=200)
PARSER.add_argument("--device", default="cpu", help="where draws are made: cpu or cuda")
PARSER.add_argument("--share", type=float, default=0.99)


def main() -> int:
    """Print a Markdown table."""
    options = PARSER.parse_args()
    entries = read_tree(ROOT / "tests" / "dataset").definitions.values()
    known = [entry.definition for entry in entries]
    definition = next(it for it in known if set(it.inputs) == {"probs", "top_k", "top_p"})
    sys.stdout.write(
        "| vocabulary | draws | right refused | power below 1 | power above 1 |\n|---:|---:|---:|---:|---:|\n"
    )
    for vocabulary in options.vocabulary:
        for line in _row(_resized(definition, vocabulary), vocabulary, options):
            sys.stdout.write(line)
            sys.stdout.flush()
    return 0


def _resized(definition: Definition, vocabulary: int) -> Definition:
    changed = definition.as_json()
    changed["axes"]["vocab_size"]["value"] = vocabulary
    return Definition.model_validate(changed)


def _row(definition: Definition, vocabulary: int, options: argparse.Namespace) -> Iterator[str]:
    runs: int = options.runs
    share: float = options.share
    device = torch.device(options.device)
    op = registry.get(definition.op_type).of_form(definition)
    case = next(it for it in op.cases(definition, sizes=["medium"], seed=0) if it.id == CASE)
    known = op.answers(definition, make_inputs(op, definition, case, device=device))
    trials = op.trials(definition, case) or 0

    def refused(power: float) -> float:
        return sum(_refused(known, trials, power, seed) for seed in range(runs)) / runs

    found = [
        next((f"{1 + sign * step:g}" for step in STEPS if refused(1 + sign * step) >= share), "-")
        for sign in (-1, 1)
    ]
    draws = trials * known["samples@probs"].shape[0]
    yield f"| {vocabulary:,} | {draws:,} | {refused(1.0):.3g} | {found[0]} | {found[1]} |\n"


def _refused(known: Mapping[str, torch.Tensor], trials: int, power: float, seed: int) -> bool:
    tokens, probs, optional = (known[f"samples@{what}"] for what in ("tokens", "probs", "optional"))
    weights = torch.where(probs > 0, probs**power, 0.0)
    generator = torch.Generator(probs.device).manual_seed(seed)
    picks = torch.multinomial(weights, trials, replacement=True, generator=generator)
    return not judge_samples(
        tokens.gather(1, picks).T.contiguous(), tokens, probs, optional, Samples().false_alarm
    )[0]


if __name__ == "__main__":
    sys.exit(main())
