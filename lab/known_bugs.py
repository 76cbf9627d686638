"""Judges the known bugs of every op, and its right ways of computing, as solutions; prints a table per op_type.

    PYTHONPATH=src:tests python lab/known_bugs.py --dataset tests/dataset --jobs 16 [--page FILE]

What `ops/<op_type>/bugs.py` lists (a page ignored, another head map, a constant off, a dead row) becomes a
solution that calls it, in torch, on the GPU where there is one. It is judged like any other, in isolated workers,
by a hidden seed, but for one thing: its workers may import this project. Exit code 1: a wrong one is accepted, or
a right one refused.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

import traceproof
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.execution.caller import CUDA_REFUSES, PRELOAD
from traceproof.judge.kernel_properties import DEMANDED
from traceproof.ops.answers import Answer, answers_of
from traceproof.ops.common.generic_bugs import wrong_answers
from traceproof.pipeline.records import PlannedCase
from traceproof.solutions.reading import Candidate
from traceproof.solutions.records import Settings, objections
from traceproof.solutions.trial import Evaluation, planned, tried
from traceproof.worker import GIB, Limits, Pool

ACCEPTED, REFUSED, SAME, ABSENT = "accepted", "refused", "same bits", "does not apply"
SOURCE = """import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, {folder!r})
from traceproof.dataset.definition import Definition
from traceproof.ops import registry
from traceproof.ops.answers import Subject, answers_of
from traceproof.ops.cases import Case
from traceproof.ops.common.generic_bugs import wrong_answers

DEFINITION = Definition.model_validate_json(Path(__file__).with_name("definition.json").read_text())
OP, _ = registry.for_definition(DEFINITION)
FOUND = answers_of(DEFINITION.op_type)
ANSWER = {{one.name: one for one in (*FOUND.right, *wrong_answers(FOUND.right[0]), *FOUND.wrong)}}[{name!r}]
HELD = []


def run(*given):
    inputs = dict(zip(DEFINITION.inputs, given, strict=True))
    axes = {{}}
    for name, spec in DEFINITION.inputs.items():
        axes.update(zip(spec.shape or (), getattr(inputs[name], "shape", ())))
    subject = Subject(
        definition=DEFINITION, op=OP, case=Case("a-call", "small", axes, 0), inputs=inputs, oracle={{}}, seed=0
    )
    return draw(subject) if subject.trials else made(subject)


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
        outputs = FOUND.right[0].make(subject)
    return {{name: outputs[name] for name in DEFINITION.outputs}}


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


def solution(definition: Definition, answer: str) -> Candidate:
    """An answer of an op_type as a solution."""
    folder = str(Path(traceproof.__file__).resolve().parents[1])
    text = SOURCE.format(folder=folder, name=answer)
    return Candidate(
        name=answer,
        path="main.py",
        definition=definition.name,
        language="python",
        entry="main.py::run",
        binding="torch",
        destinations=False,
        files={"main.py": text, "definition.json": json.dumps(definition.as_json())},
    )


def settings(dataset: Path, hidden_seed: int) -> Settings:
    """How they are judged: small, edge and adversarial cases."""
    gpu = torch.cuda.is_available()
    return Settings(
        dataset=str(dataset),
        conceal=(),
        sizes=("small",),
        seed=0,
        hidden_seed=hidden_seed,
        memory_limit=2 * GIB,
        tolerance=None,
        limits=Limits(seconds=120.0, setup_seconds=120.0, memory_bytes=8 * GIB).as_json(),
        demanded=DEMANDED,
        gpu=gpu,
        weak=True,
        environment={},
    )


def pool(*, gpu: bool) -> Pool:
    """Isolated workers that may import this project, unlike those of strangers' solutions."""
    source = str(Path(traceproof.__file__).resolve().parents[1])
    env = {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return Pool(preload=PRELOAD, env=env, gpu=gpu, without=CUDA_REFUSES if gpu else ())


def judge_all(dataset: str, name: str, hidden_seed: int) -> list[Judged]:
    """All answers that are known for a definition."""
    torch.set_num_threads(1)
    given = settings(Path(dataset), hidden_seed)
    with tempfile.TemporaryDirectory() as folder, pool(gpu=given.gpu) as workers:
        definition, cases = planned(name, given, Path(folder))
        found = answers_of(definition.op_type)
        if found is None:
            return []
        wrong = (*wrong_answers(found.right[0]), *found.wrong)
        known = [(answer, False) for answer in found.right] + [(answer, True) for answer in wrong]
        return [_judged(definition, cases, answer, given, workers, wrong=bad) for answer, bad in known]


def _judged(  # noqa: PLR0913 - one solution
    definition: Definition,
    cases: Sequence[PlannedCase],
    answer: Answer,
    given: Settings,
    workers: Pool,
    *,
    wrong: bool,
) -> Judged:
    evaluation = Evaluation.of(definition, solution(definition, answer.name), given, workers)
    trial = tried(evaluation, cases)
    needed = [spec for spec in definition.outputs.values() if not spec.optional]
    reasons = list(objections(trial, len(needed)))
    seen = sorted({str(row.reason) for row in trial.rows if row.bad} | {p.name for p in trial.properties if p.bad})
    outcome = REFUSED if reasons else ACCEPTED
    if wrong and outcome == ACCEPTED:
        outcome = _without_effect(evaluation, cases, answer) or outcome
    return Judged(answer.name, wrong, outcome, ", ".join(seen))


def _without_effect(evaluation: Evaluation, cases: Sequence[PlannedCase], answer: Answer) -> str | None:
    """Why an answer is not wrong in any case of a definition: it says nothing there, or gives the same bits."""
    found = answers_of(evaluation.definition.op_type)
    assert found is not None
    said = False
    for case in (case for case in cases if case.skip is None):
        subject = evaluation.subject(case.case)
        outputs, right = answer.make(subject), found.right[0].make(subject)
        if outputs is None or right is None:
            continue
        said = True
        if any(not torch.equal(_bits(outputs[name]), _bits(right[name])) for name in outputs):
            return None
    return SAME if said else ABSENT


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8) if value.dim() else value


def table(found: dict[str, list[Judged]]) -> Iterator[str]:
    """Counts per op_type, as Markdown."""
    yield "| op_type | wrong refused | accepted | same bits | does not apply | right accepted | refused | seen |"
    yield "|---|---:|---:|---:|---:|---:|---:|---|"
    total: Counter[tuple[bool, str]] = Counter()
    for op_type, judged in sorted(found.items()):
        counts = Counter((one.wrong, one.outcome) for one in judged)
        total.update(counts)
        reasons = Counter(part for one in judged if one.wrong for part in one.reason.split(", ") if part)
        seen = ", ".join(f"{name} {count}" for name, count in reasons.most_common())
        yield f"| {op_type} | {_cells(counts)} | {seen} |"
    yield f"| all | {_cells(total)} | |"


def _cells(counts: Counter[tuple[bool, str]]) -> str:
    wrong = [counts[True, outcome] for outcome in (REFUSED, ACCEPTED, SAME, ABSENT)]
    right = [counts[False, outcome] for outcome in (ACCEPTED, REFUSED)]
    return " | ".join(map(str, (*wrong, *right)))


def _told(judged: Sequence[Judged]) -> str:
    counts = Counter(f"{'wrong' if one.wrong else 'right'} ones {one.outcome}" for one in judged)
    return ", ".join(f"{count} {what}" for what, count in counts.items()) or "no bugs are known"


def main() -> int:
    """Exit code 1: the judge was wrong about one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, default=Path("tests/dataset"))
    parser.add_argument("--op-type", nargs="*", help="these alone")
    parser.add_argument("--per-op", type=int, default=1000, help="definitions per op_type")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--hidden-seed", type=int, default=987_654)
    parser.add_argument("--page", type=Path, help="file for the table")
    options = parser.parse_args()
    entries = {name: entry.definition.op_type for name, entry in read_tree(options.dataset).definitions.items()}
    chosen = {
        name: op
        for name, op in entries.items()
        if (options.op_type is None or op in options.op_type)
        and [other for other in entries if entries[other] == op].index(name) < options.per_op
    }
    found: dict[str, list[Judged]] = {}
    bad = 0
    started = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as processes:
        dataset = str(options.dataset.resolve())
        futures = {processes.submit(judge_all, dataset, name, options.hidden_seed): name for name in chosen}
        for future in as_completed(futures):
            name = futures[future]
            judged = future.result()
            found.setdefault(chosen[name], []).extend(judged)
            for one in (one for one in judged if one.bad):
                bad += 1
                kind = "wrong" if one.wrong else "right"
                sys.stdout.write(f"{name}: {kind} answer {one.answer!r} {one.outcome} ({one.reason})\n")
            sys.stderr.write(f"{time.monotonic() - started:.0f} s: {name}: {_told(judged)}\n")
    text = "\n".join(table(found)) + "\n"
    sys.stdout.write(text)
    if options.page:
        options.page.write_text(text, encoding="utf-8")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
