"""The page on published evaluators: what each lets pass, and tolerances that do best in their formats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from calibration import sampling
from calibration.evaluators import EVALUATORS, READ

OURS = "traceproof"
ALL = (OURS, *EVALUATORS, sampling.NAME)
GRID = [base * 10.0**power for power in range(-5, 1) for base in (1.0, 3.0)]
CAP = 2.0  # times the largest error of a right answer: SOL-ExecBench's max_error_cap
INTRODUCTION = """Which known wrong answers published evaluators would pass, and which right ones they would
refuse:

    PYTHONPATH=src:lab python lab/judge_of_judges.py --dataset DATASET --dataset tests/dataset --page PAGE

Cases and answers are this project's own, which favours it: small, edge and adversarial cases of seed 0, as solved
by the float64 oracle. An answer counts as refused when any output of any case is. Proposals are fitted to the same
answers, so they say what a format can do at best; of those that refuse equally many, the widest is given."""
SAMPLERS = """Samplers are drawn 500,000 times a row, as flashinfer-bench does, from the distribution that each way
of sampling has; sizes small and medium. The other evaluators compare values, which says nothing of draws."""
THRESHOLDS = """`threshold` is the least `sampling_tvd_threshold`, to two digits, that refuses no right way of
sampling which stays in the mask; `refused` counts wrong ones by it and by the mask."""
PROPOSED = """`refused` counts wrong answers. Right answers are all let pass but for those with an infinity (the
log-sum-exp of a row without keys), which flashinfer-bench refuses by any tolerance. KernelBench has one tolerance
for atol and rtol."""
COLUMNS = (
    "definition",
    "wrong",
    "flashinfer-bench: atol, rtol, required_matched_ratio",
    "refused",
    "right refused",
    "SOL-ExecBench: max_atol, max_rtol, required_matched_ratio, max_error_cap, allow_negative_inf",
    "refused",
    "KernelBench: atol = rtol",
    "refused",
)
LIMITS = ("atol", "rtol", "ratio", "max_error_cap")
Found = dict[str, Any]


def proposals(found: Found) -> dict[str, Found]:
    """Tolerances in each format with the wrong answers that they would refuse, and right ones they must refuse."""
    right = [one for one in found["answers"] if not one["wrong"]]
    wrong = [one for one in found["answers"] if one["wrong"]]
    infinite = sum(one["infinite"] for one in right)
    cap = CAP * max((one["largest"] for one in right), default=0.0)
    bench = _best(right, wrong, "both", cap=None)
    sol = _best(right, wrong, "sum", cap=cap)
    plain = next((t for i, t in enumerate(GRID) if all(one["within"]["sum"][i][i] >= 1 for one in right)), None)
    place = GRID.index(plain) if plain else 0
    refused = sum(one["infinite"] or one["within"]["sum"][place][place] < 1 for one in wrong) if plain else 0
    return {
        "flashinfer-bench": {**bench, "right": infinite},
        "SOL-ExecBench": {**sol, "max_error_cap": cap, "allow_negative_inf": bool(infinite), "right": 0},
        "KernelBench": {"atol": plain, "rtol": plain, "refused": refused, "right": 0 if plain else len(right)},
    }


def _best(right: Sequence[Found], wrong: Sequence[Found], formula: str, *, cap: float | None) -> Found:
    """The tolerances that refuse most; of equal ones those for most elements, and of these the widest."""
    best: Found = {"atol": None, "rtol": None, "ratio": None, "refused": -1}
    for i, atol in enumerate(GRID):
        for k, rtol in enumerate(GRID):
            least = min((one["within"][formula][i][k] for one in right), default=1.0)
            ratio = int(least * 1000) / 1000  # three digits, rounded down
            off = [one["infinite"] or one["within"][formula][i][k] < ratio for one in wrong]
            large = [cap is not None and one["largest"] > cap for one in wrong]
            refused = sum(one or other for one, other in zip(off, large, strict=True))
            if ratio > 0 and (refused, ratio) >= (best["refused"], best["ratio"] or 0):
                best = {"atol": atol, "rtol": rtol, "ratio": ratio, "refused": refused}
    return best


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
    yield f"| {sampling.NAME} | {' '.join(sampling.FORMULA.split())} | {READ} |"
    yield ""
    yield from SAMPLERS.splitlines()
    yield from _totals(found)
    yield from _each(found)
    samplers = [entry for entry in found if any("distance" in one for one in entry["answers"])]
    yield from _proposed([entry for entry in found if entry not in samplers])
    yield from _thresholds(samplers)
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


def _proposed(found: Sequence[Found]) -> Iterator[str]:
    yield ""
    yield "## Tolerances that do best in each format"
    yield ""
    yield from PROPOSED.splitlines()
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---|---:|---|---:|---:|---|---:|---|---:|"
    totals: Counter[str] = Counter()
    for entry in found:
        wrong = sum(one["wrong"] for one in entry["answers"])
        best = proposals(entry)
        bench, sol, plain = best["flashinfer-bench"], best["SOL-ExecBench"], best["KernelBench"]
        totals.update(wrong=wrong, bench=bench["refused"], right=bench["right"])
        totals.update(sol=sol["refused"], plain=plain["refused"])
        cells = (
            entry["definition"],
            wrong,
            _figures(bench["atol"], bench["rtol"], bench["ratio"]),
            bench["refused"],
            bench["right"],
            f"{_figures(*(sol[name] for name in LIMITS))}, {str(sol['allow_negative_inf']).lower()}",
            sol["refused"],
            _figures(plain["atol"]),
            plain["refused"],
        )
        yield f"| {' | '.join(map(str, cells))} |"
    refused = (totals["sol"], "", totals["plain"])
    cells = ("all", totals["wrong"], "", totals["bench"], totals["right"], "", *refused)
    yield f"| {' | '.join(map(str, cells))} |"


def _thresholds(samplers: Sequence[Found]) -> Iterator[str]:
    """Thresholds of flashinfer-bench's distance that do best."""
    if not samplers:
        return
    yield ""
    yield from THRESHOLDS.splitlines()
    yield ""
    yield "| sampler | wrong | threshold | refused | refused by 0.2 | right ones outside of the mask |"
    yield "|---|---:|---:|---:|---:|---:|"
    for entry in samplers:
        wrong = [one for one in entry["answers"] if one["wrong"]]
        right = [one for one in entry["answers"] if not one["wrong"]]
        least = max((one["distance"] for one in right if not one["outside"]), default=1.0)
        threshold = math.ceil(least * 100) / 100
        best = sum(one["outside"] or one["distance"] > threshold for one in wrong)
        usual = sum(one["refused"][sampling.NAME] for one in wrong)
        outside = sum(one["outside"] for one in right)
        yield f"| {entry['definition']} | {len(wrong)} | {threshold:.2g} | {best} | {usual} | {outside} |"


def _figures(*values: float | None) -> str:
    return ", ".join("none" if value is None else f"{value:.3g}" for value in values)
