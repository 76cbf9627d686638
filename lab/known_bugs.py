"""Judges the known bugs of every op, and its right ways of computing, as solutions; prints a table.

    PYTHONPATH=src:lab python lab/known_bugs.py --dataset tests/dataset [MORE] --jobs 16

What an op's declaration lists as mutants (a page ignored, another head map, a constant off, a dead row) becomes a
solution that calls it, in torch, on the GPU where there is one. It is judged like any other, in isolated workers,
by a hidden seed, but for one thing: its workers may import this project. Exit code 1: a wrong one is accepted, or
a right one refused.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import traceproof
from calibrate import side_by_side
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.judge.arbitration import generic_mutants
from traceproof.judge.kernel_properties import DEMANDED
from traceproof.ops import registry
from traceproof.ops.base import Tensors
from traceproof.ops.formula import Variant
from traceproof.run.case import SolvedCase, solve
from traceproof.run.workers import RUNNER
from traceproof.sandbox import GIB, Limits, Pool
from traceproof.sandbox.isolation import CUDA_REFUSES
from traceproof.solutions.reading import Candidate
from traceproof.solutions.records import JudgeSettings, objections
from traceproof.solutions.trial import SolutionRun, planned, tried
from variants import variants_of

# Of this project, that solutions import.
FOLDERS = [str(Path(one).resolve().parent) for one in (Path(traceproof.__file__).parent, __file__)]
SOURCE = """import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path[:0] = {folders!r}
from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.op import Subject
from traceproof.ops.cases import Case
from traceproof.judge.arbitration import generic_mutants
from variants import variants_of

DEFINITION = Definition.model_validate_json(Path(__file__).with_name("definition.json").read_text())
OP, _ = registry.for_definition(DEFINITION)
RIGHT = variants_of(DEFINITION.op_type)
EVERY = (*RIGHT, *generic_mutants(RIGHT[0]), *registry.mutants_of(DEFINITION))
ANSWER = {{one.name: one for one in EVERY}}[{name!r}]
HELD = []


def run(*given):
    inputs = dict(zip(DEFINITION.inputs, given, strict=True))
    axes = {{}}
    for name, spec in DEFINITION.inputs.items():
        axes.update(zip(spec.shape or (), getattr(inputs[name], "shape", ())))
    subject = Subject(
        definition=DEFINITION, op=OP, case=Case("a-call", "small", axes, 0), inputs=inputs, oracle={{}}, seed=0
    )
    if subject.trials:
        return draw(subject)
    found = made(subject)
    for name in found.keys() - DEFINITION.outputs.keys():  # an input that is written to
        inputs[name].copy_(found[name])
    return {{name: found[name] for name in DEFINITION.outputs}}


def made(subject):
    try:
        return computed(subject)
    except RuntimeError as error:
        if "device" not in str(error).lower():
            raise
    # A bug whose code makes tensors on the CPU alone is computed there.
    given = {{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in subject.inputs.items()}}
    outputs = computed(replace(subject, inputs=given))
    place = next(v.device for v in subject.inputs.values() if isinstance(v, torch.Tensor))
    return {{name: value.to(place) for name, value in outputs.items()}}


def computed(subject):
    outputs = ANSWER.make(subject)
    if outputs is None:  # the bug says nothing about this case
        outputs = RIGHT[0].make(subject)
    return {{name: outputs[name] for name in {{**DEFINITION.outputs, **OP.judged(DEFINITION)}} if name in outputs}}


def draw(subject):
    # One of the draws that an answer makes at once, for the same inputs.
    on_cpu = {{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in subject.inputs.items()}}
    if not HELD or not same(HELD[0], on_cpu) or not len(HELD[1]):
        seed = int(torch.randint(1 << 30, ()))
        HELD[:] = [on_cpu, list(made(replace(subject, inputs=on_cpu, seed=seed))["samples"])]
    return HELD[1].pop().to(subject.tensor("probs").device)


def same(one, other):
    return all(torch.equal(torch.as_tensor(one[k]), torch.as_tensor(other[k])) for k in one)
"""


def solution(definition: Definition, answer: str) -> Candidate:
    """An answer of an op_type as a solution."""
    text = SOURCE.format(folders=FOLDERS, name=answer)
    return Candidate(
        name=answer,
        path="main.py",
        definition=definition.name,
        destinations=False,
        files={"main.py": text, "definition.json": json.dumps(definition.as_json())},
    )


ACCEPTED, REFUSED, SAME, ABSENT = "accepted", "refused", "same bits", "does not apply"


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of one answer, and for what it was refused."""

    answer: str
    wrong: bool
    outcome: str
    reason: str

    @property
    def bad(self) -> bool:
        """Whether the judge was wrong."""
        return self.outcome == (ACCEPTED if self.wrong else REFUSED)


def table(found: Mapping[tuple[str, str], Sequence[Judged]]) -> Iterator[str]:
    """Counts per definition, and what the judge was wrong about, as Markdown."""
    columns = "wrong refused", ACCEPTED, SAME, ABSENT, "right accepted", REFUSED
    yield f"| op_type | definition | {' | '.join(columns)} | seen |"
    yield f"|---|---|{'---:|' * len(columns)}---|"
    total: Counter[tuple[bool, str]] = Counter()
    for (op_type, name), judged in sorted(found.items()):
        counts = Counter((one.wrong, one.outcome) for one in judged)
        total.update(counts)
        reasons = Counter(part for one in judged if one.wrong for part in one.reason.split(", ") if part)
        seen = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        yield f"| {op_type} | {name} | {_cells(counts)} | {seen} |"
    yield f"| all | {len(found)} | {_cells(total)} | |"
    for (_, name), judged in sorted(found.items()):
        for one in (one for one in judged if one.bad):
            kind = "wrong" if one.wrong else "right"
            yield f"\n{name}: {kind} answer {one.answer!r} {one.outcome} ({one.reason})"


def _cells(counts: Counter[tuple[bool, str]]) -> str:
    wrong = [counts[True, outcome] for outcome in (REFUSED, ACCEPTED, SAME, ABSENT)]
    right = [counts[False, outcome] for outcome in (ACCEPTED, REFUSED)]
    return " | ".join(map(str, (*wrong, *right)))


def settings(dataset: Path, hidden_seed: int, *, memory_gib: int = 2) -> JudgeSettings:
    """How they are judged: small, edge and adversarial cases."""
    gpu = torch.cuda.is_available()
    return JudgeSettings(
        dataset=str(dataset),
        conceal=(),
        sizes=("small",),
        seed=0,
        hidden_seed=hidden_seed,
        memory_limit=memory_gib * GIB,
        tolerance=None,
        limits=Limits(seconds=120.0, setup_seconds=120.0, memory_bytes=(memory_gib + 8) * GIB).as_json(),
        demanded=DEMANDED,
        gpu=gpu,
        weak=True,
        environment={},
    )


def pool(*, gpu: bool) -> Pool:
    """Isolated workers that may import this project, unlike those of untrusted solutions."""
    env = {"PYTHONPATH": os.pathsep.join(FOLDERS), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return Pool(preload=("torch", RUNNER), env=env, gpu=gpu, without=CUDA_REFUSES if gpu else ())


def known(definition: Definition) -> list[tuple[Variant, bool]]:
    """The variants and mutants of a definition, and whether each is wrong."""
    right = variants_of(definition.op_type)
    wrong = (*generic_mutants(right[0]), *registry.mutants_of(definition))
    return [*((variant, False) for variant in right), *((mutant, True) for mutant in wrong)]


def judged(name: str, given: JudgeSettings) -> list[Judged]:
    """What comes of all answers to a definition. One process judges them: cases are drawn and solved once."""
    torch.set_num_threads(1)
    definition, cases = planned(name, given)
    answers, found = known(definition), []
    with pool(gpu=given.gpu) as workers:
        subjects = [solve(definition, case.case) for case in cases if case.skip is None]
        plain = [answers[0][0].make(subject) for subject in subjects]
        for answer, wrong in answers:
            if wrong and (nothing := _without_effect(answer, subjects, plain)):
                found.append(Judged(answer.name, wrong, nothing, ""))
                continue
            with SolutionRun.of(definition, solution(definition, answer.name), given, workers) as run:
                trial = tried(run, cases, whole=not wrong)
            seen = {str(row.reason) for row in trial.rows if row.bad} | {p.name for p in trial.properties if p.bad}
            outcome = REFUSED if [*objections(trial, definition)] else ACCEPTED
            found.append(Judged(answer.name, wrong, outcome, ", ".join(sorted(seen))))
    return found


def _without_effect(answer: Variant, subjects: Sequence[SolvedCase], plain: Sequence[Tensors | None]) -> str:
    """Why an answer is not wrong in any case: it says nothing there, or gives the same bits; empty: it is."""
    said = ""
    for subject, right in zip(subjects, plain, strict=True):
        outputs = answer.make(subject)
        if outputs is not None and right is not None:
            said = SAME
            if any(not torch.equal(_bits(outputs[name]), _bits(right[name])) for name in outputs):
                return ""
    return said or ABSENT


def _bits(value: torch.Tensor) -> torch.Tensor:
    # Contiguous tensors may have any stride along an axis of one element; copies have not.
    return value.clone(memory_format=torch.contiguous_format).view(torch.uint8) if value.dim() else value


def main() -> int:
    """Exit code 1: the judge was wrong about one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, nargs="+", default=[Path("tests/dataset")])
    parser.add_argument("--op-type", nargs="*", help="these alone")
    parser.add_argument("--per-op", type=int, default=1000, help="definitions per op_type")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--hidden-seed", type=int, default=987_654)
    parser.add_argument("--memory-gib", type=int, default=2, help="leave cases out that need more")
    options = parser.parse_args()
    given = settings(Path(), options.hidden_seed, memory_gib=options.memory_gib)
    calls: dict[tuple[str, str], tuple[str, JudgeSettings]] = {}
    for dataset in options.dataset:
        for name, entry in read_tree(dataset).definitions.items():
            op_type = entry.definition.op_type
            taken = sum(other == op_type for other, _ in calls)
            if (not options.op_type or op_type in options.op_type) and taken < options.per_op:
                placed = given.model_copy(update={"dataset": str(dataset.resolve())})
                calls.setdefault((op_type, name), (name, placed))
    found: dict[tuple[str, str], list[Judged]] = {}
    started = time.monotonic()
    for key, answers, error in side_by_side(judged, calls, options.jobs):
        if error is not None:
            raise error
        found[key] = answers
        sys.stderr.write(f"{time.monotonic() - started:.0f} s: {len(found)} of {len(calls)}: {key[1]}\n")
    sys.stdout.write("\n".join(table(found)) + "\n")
    return int(any(one.bad for answers in found.values() for one in answers))


if __name__ == "__main__":
    sys.exit(main())
