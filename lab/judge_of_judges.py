"""Judges published evaluators: which known wrong answers each would pass, and which right ones it would refuse.

    PYTHONPATH=src:lab python lab/judge_of_judges.py --dataset DATASET [--dataset MORE] --page PAGE

Answers are the variants and mutants of an op's declaration, on the small, edge and adversarial cases of seed 0. A
definition's figures are kept in --out and not measured again. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from calibration.evaluators import EVALUATORS, FORMULA, READ, SAMPLING, drawn
from calibration.measure import memory
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.judge.output import judge_output
from traceproof.ops import registry
from traceproof.ops.answers import Answer, answers_of, wrong_answers
from traceproof.ops.base import Tensors
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solved
from traceproof.run.tensors import same_bits
from traceproof.sandbox import GIB

SIZES = ("small",)
SAMPLER_SIZES = ("small", "medium")  # small cases of samplers have too few draws for numbers
OURS = "traceproof"
ALL = (OURS, *EVALUATORS, SAMPLING)
Found = dict[str, Any]
INTRODUCTION = """Which known wrong answers published evaluators would pass, and which right ones they would
refuse:

    PYTHONPATH=src:lab python lab/judge_of_judges.py --dataset DATASET --dataset tests/dataset --page PAGE

Cases and answers are this project's own, which favours it: small, edge and adversarial cases of seed 0, as solved
by the float64 oracle. An answer counts as refused when any output of any case is."""
SAMPLERS = """Samplers are drawn 500,000 times a row, as flashinfer-bench does, from the distribution that each way
of sampling has; sizes small and medium. The other evaluators compare values, which says nothing of draws."""


def measure(given: dict[str, Any]) -> Found:
    """What each evaluator makes of each answer to a definition."""
    torch.set_num_threads(1)
    definition = Definition.model_validate(given)
    found = answers_of(definition.op_type)
    op, _ = registry.for_definition(definition)
    assert found is not None
    draws = any(op.trials(definition, case) for case in op.cases(definition, sizes=SIZES, seed=0))
    subjects = list(solved(definition, SAMPLER_SIZES if draws else SIZES, 0))
    if draws:
        right = [(answer, False) for answer in found.right]
        answers = [
            _sampler(answer, subjects, wrong=bad) for answer, bad in right + [(a, True) for a in found.wrong]
        ]
        kept = [answer for answer in answers if answer is not None]
        return {"definition": definition.name, "op_type": definition.op_type, "answers": kept}
    baseline = [found.right[0].make(subject) for subject in subjects]
    wrong = (*wrong_answers(found.right[0]), *found.wrong)
    judged: list[Found] = []
    for answer, bad in [*((one, False) for one in found.right), *((one, True) for one in wrong)]:
        one = _answer(definition, answer, subjects, baseline if bad else None)
        if one is not None:
            judged.append({"answer": answer.name, "wrong": bad, **one})
    return {"definition": definition.name, "op_type": definition.op_type, "answers": judged}


def _sampler(answer: Answer, subjects: Sequence[SolvedCase], *, wrong: bool) -> Found | None:
    """Who refuses a way of sampling; None: it is given in no case, or by the right distribution alone."""
    seen = drawn(answer, subjects)
    outputs = [(subject, answer.make(subject)) for subject in subjects]
    if seen is None:
        return None
    ours = any(_ours(subject, "samples", given) for subject, given in outputs if given is not None)
    refused = {OURS: ours, SAMPLING: seen.refused}
    return {"answer": answer.name, "wrong": wrong, "refused": refused}


def _answer(
    definition: Definition,
    answer: Answer,
    subjects: Sequence[SolvedCase],
    baseline: Sequence[Tensors | None] | None,
) -> Found | None:
    """Who refuses an answer; None: it is not given in any case, or has the right one's bits in all."""
    serving = {name: one for name, one in EVALUATORS.items() if one.serves(definition)}
    refused = dict.fromkeys((OURS, *serving), False)
    told = False
    for place, subject in enumerate(subjects):
        outputs = answer.make(subject)
        if outputs is None or (baseline is not None and _same(outputs, baseline[place])):
            continue
        told = True
        right = {name: subject.oracle[name] for name in outputs if name in subject.oracle}
        refused[OURS] |= any(_ours(subject, name, outputs) for name in definition.outputs)
        for name, one in serving.items():
            refused[name] |= one.refuses(definition, outputs, right)
    return {"refused": refused} if told else None


def _ours(subject: SolvedCase, name: str, outputs: Tensors) -> bool:
    ruling = judge_output(outputs.get(name), subject.expected(name), tolerance=None)
    return ruling.verdict != Verdict.PASS


def _same(outputs: Tensors, right: Tensors | None) -> bool:
    return right is not None and all(same_bits(value, right[name]) for name, value in outputs.items())


def page(found: Sequence[Found], left_out: Mapping[str, str]) -> Iterator[str]:
    """The page, as Markdown."""
    yield "# Judge of judges"
    yield ""
    yield from INTRODUCTION.splitlines()
    yield ""
    yield "| evaluator | rule | figures |"
    yield "|---|---|---|"
    for name, one in EVALUATORS.items():
        yield f"| {name} | {one.formula} | {one.known} |"
    yield f"| {SAMPLING} | {' '.join(FORMULA.split())} | {READ} |"
    yield ""
    yield from SAMPLERS.splitlines()
    yield from _totals(found)
    yield from _each(found)
    if left_out:
        yield ""
        yield "Left out: " + "; ".join(f"`{name}` ({why})" for name, why in left_out.items()) + "."


def _totals(found: Sequence[Found]) -> Iterator[str]:
    yield ""
    yield "## All definitions"
    yield ""
    yield "| evaluator | definitions | wrong passed | of | right refused | of |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name in ALL:
        answers = [one for entry in found for one in entry["answers"] if name in one["refused"]]
        definitions = sum(any(name in one["refused"] for one in entry["answers"]) for entry in found)
        wrong = [one for one in answers if one["wrong"]]
        right = [one for one in answers if not one["wrong"]]
        passed = sum(not one["refused"][name] for one in wrong)
        refused = sum(one["refused"][name] for one in right)
        yield f"| {name} | {definitions} | {passed} | {len(wrong)} | {refused} | {len(right)} |"


def _each(found: Sequence[Found]) -> Iterator[str]:
    yield ""
    yield "## By definition"
    yield ""
    yield "| definition | evaluator | wrong answers that pass | right ones that are refused |"
    yield "|---|---|---|---|"
    for entry in found:
        for name in ALL:
            judged = [one for one in entry["answers"] if name in one["refused"]]
            passed = [one["answer"] for one in judged if one["wrong"] and not one["refused"][name]]
            refused = [one["answer"] for one in judged if not one["wrong"] and one["refused"][name]]
            if passed or refused:
                yield f"| {entry['definition']} | {name} | {'; '.join(passed)} | {'; '.join(refused)} |"


def main() -> int:
    """Exit code 0: the page is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, action="append", required=True, help="may be given several times")
    parser.add_argument("--op-type", nargs="*", help="these alone")
    parser.add_argument("--out", type=Path, default=Path("results/judge-of-judges"))
    parser.add_argument("--page", type=Path, help="file for the page")
    parser.add_argument("--memory-gib", type=int, default=4, help="leave definitions out that need more")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen: dict[str, Definition] = {}
    left_out: dict[str, str] = {}
    for dataset in options.dataset:
        for name, entry in read_tree(dataset).definitions.items():
            why = _why_not(entry.definition, options)
            if why is None:
                chosen.setdefault(name, entry.definition)
            elif why and name not in chosen:
                left_out[name] = why
    started = time.monotonic()
    waiting = {name: one for name, one in chosen.items() if not (options.out / f"{name}.json").exists()}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as processes:
        order = sorted(waiting.values(), key=lambda one: memory(one, SIZES))
        futures = {processes.submit(measure, one.as_json()): one.name for one in order}
        for future in as_completed(futures):
            name = futures[future]
            (options.out / f"{name}.json").write_text(json.dumps(future.result()), encoding="utf-8")
            sys.stderr.write(f"{time.monotonic() - started:.0f} s: {name}\n")
            _write(options, chosen, left_out)
    _write(options, chosen, left_out)
    return 0


def _why_not(definition: Definition, options: argparse.Namespace) -> str | None:
    """Why a definition is left out; empty: nobody asked for it."""
    _, unknown = registry.for_definition(definition)
    if options.op_type is not None and definition.op_type not in options.op_type:
        return ""
    if unknown is not None or answers_of(definition.op_type) is None:
        return "no answers are known"
    if memory(definition, SIZES) > options.memory_gib * GIB:
        return f"needs more than {options.memory_gib} GiB"
    return None


def _write(options: argparse.Namespace, chosen: Mapping[str, Definition], left_out: Mapping[str, str]) -> None:
    files = [options.out / f"{name}.json" for name in sorted(chosen)]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    text = "\n".join(page(found, left_out)) + "\n"
    if options.page:
        options.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
