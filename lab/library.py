"""Judges exploits, honest solutions and known bugs by the command and by the library; prints where these differ.

    PYTHONPATH=src:lab:tests python lab/library.py [--only exploits mutants] [--every 4]

Exploits and honest solutions of tests/exploits that a CPU runs: `traceproof judge`, and a pytest file whose tests
have the plugin's mark with `isolated=True`. Known bugs of every op, on one small case of each definition of
tests/dataset: the judge's rulings on what they give, and `assert_right`. Exit code 1: a verdict differs, or is not
the expected one.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from exploits.corpus import EXPLOITS, TESTS, Exploit, dataset
from exploits.honest import WRITTEN, Honest

import traceproof
from traceproof.dataset.tree import read_tree
from traceproof.ops import registry
from traceproof.reasons import Verdict
from traceproof.run.case import CPU, SolvedCase, make_inputs
from traceproof.run.judging import rulings
from traceproof.run.plan import PlanSelection, planned_alone
from traceproof.run.untrusted import CaseResult
from traceproof.solutions.reading import Candidate

say = partial(print, flush=True)  # a line, at once

SEED = 0
TEST = """
@pytest.mark.traceproof({definition!r}, dataset={dataset!r}, sizes=["small"], isolated=True)
def test_{name}(case):
    case.check({file!r})
"""


def solutions(every: int) -> bool:
    """Verdicts of the command and of the plugin; gives whether all are as expected."""
    known: list[Exploit | Honest] = [*EXPLOITS[::every], *WRITTEN[::every]]
    expected = {one.name: isinstance(one, Honest) for one in known}
    with tempfile.TemporaryDirectory() as scratch:
        root, folder = dataset(Path(scratch, "dataset")), Path(scratch, "solutions")
        folder.mkdir()
        tree = read_tree(root)
        tests = ["import pytest\n"]
        for one in known:
            definition = tree.definitions[one.definition].definition
            found = Candidate(
                name=one.name, path=one.name, files={"main.py": one.source},
                destinations=getattr(one, "destinations", None),
            ).settled(definition)  # fmt: skip
            spec: dict[str, object] = {"language": "python", "target_hardware": ["cpu"]}
            spec |= {"entry_point": "main.py::run", "destination_passing_style": found.destinations}
            record = {"name": one.name, "definition": one.definition, "author": "lab", "spec": spec}
            file = folder / f"{one.name}.json"
            file.write_text(json.dumps(record | {"sources": [{"path": "main.py", "content": one.source}]}))
            tests.append(TEST.format(definition=one.definition, dataset=str(root), name=one.name, file=str(file)))
        Path(scratch, "test_all.py").write_text("".join(tests))
        out = Path(scratch, "certificates.json")
        command = [sys.executable, "-m", "traceproof", "judge", str(folder), "--dataset", str(root)]
        command += ["--test-sizes", "small", "--out", f"{scratch}/out", "--json", str(out)]
        plugin = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"]
        wide = {**os.environ, "COLUMNS": "500"}  # pytest cuts what it says of a test
        plugin += ["-p", "traceproof.pytest_plugin"] if not _installed() else []
        plugin += ["-n", str(max(1, len(os.sched_getaffinity(0)) // 2))] if find_spec("xdist") else []
        with subprocess.Popen(command, stdout=subprocess.DEVNULL):  # beside the plugin
            done = subprocess.run(
                [*plugin, f"{scratch}/test_all.py"], check=False, text=True, capture_output=True, env=wide
            )
        by_command = {one["solution"]: one["verdict"] for one in json.loads(out.read_text())["certificates"]}
        by_plugin = {}
        for line in done.stdout.splitlines():
            ended = re.match(r"(PASSED|FAILED|ERROR) \S+::test_(\w+)\S*(?: - (.*))?", line)
            if ended:
                told = (ended[3] or "accepted").removeprefix("AssertionError: ")
                by_plugin[ended[2]] = "refused" if told.startswith("WRONG") else told
    wrong = 0
    for name, right in expected.items():
        wanted, both = "accepted" if right else "refused", (by_command.get(name), by_plugin.get(name))
        if both != (wanted, wanted):
            wrong += 1
            say(f"{name}: expected {wanted}, the command {both[0]}, the plugin {both[1]}")
    counts = Counter(expected.values())
    say(f"{counts[False]} exploits, {counts[True]} honest solutions: {len(expected) - wrong} as expected by both")
    return not wrong


def _installed() -> bool:
    """Whether pytest finds the plugin by itself."""
    from importlib.metadata import entry_points

    return any(one.value == "traceproof.pytest_plugin" for one in entry_points(group="pytest11"))


def mutants(every: int) -> bool:
    """Rulings on known bugs' outputs, and what `assert_right` says; gives whether these agree."""
    counts: Counter[str] = Counter()
    tree = read_tree(TESTS)
    for name in sorted(tree.definitions)[::every]:
        definition = tree.definitions[name].definition
        op, unknown = registry.for_definition(definition)
        selection = PlanSelection(sizes=("small",), seed=SEED, cases=("small-0",))
        plan = planned_alone(definition, selection) if unknown is None else None
        for planned in plan.cases if plan else ():
            if planned.skip is not None:
                continue
            case, inputs = planned.case, make_inputs(op, definition, planned.case, device=CPU, dataset=TESTS)
            oracle = op.expected(definition, inputs)
            subject = SolvedCase(definition=definition, op=op, case=case, inputs=inputs, oracle=oracle, seed=1)
            for bug, outputs in _answers(subject):
                result = CaseResult(outputs=outputs)
                ruled = (one for _, one in rulings(subject, result, tolerance=None))
                bad = [one for one in ruled if one.verdict in {Verdict.FAIL, Verdict.ERROR}]
                try:
                    traceproof.assert_right(definition, inputs, outputs)
                    said = True
                except AssertionError:
                    said = False
                counts["accepted" if said else "refused"] += 1
                if said == bool(bad):
                    counts["different"] += 1
                    say(f"{definition.name} {planned.id} {bug}: rulings {bad}, assert_right {said}")
    say(f"outputs of known bugs: {dict(counts)}")
    return not counts["different"]


def _answers(subject: SolvedCase) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """What each known bug that says anything of a case gives."""
    for one in registry.mutants_of(subject.definition):
        outputs = one.make(subject)
        if outputs is not None:
            names = subject.definition.outputs
            yield one.name, {name: value for name, value in outputs.items() if name in names}


def main() -> int:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"exploits": solutions, "mutants": mutants}
    parser.add_argument("--only", nargs="+", choices=parts, default=[*parts])
    parser.add_argument("--every", type=int, default=1, help="one of so many alone")
    options = parser.parse_args()
    found = [parts[name](options.every) for name in options.only]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
