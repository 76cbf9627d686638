"""The tests that every definition gets. A class names its definition; all else is read from there."""

import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any, ClassVar

import pytest
import torch

from traceproof.dataset.reference_text import assigned
from traceproof.judge.output import Ruling, misconduct
from traceproof.ops.base import TORCH_DTYPES
from traceproof.reasons import Unavailable, Verdict
from traceproof.run.implementation import OTHER_SEED
from traceproof.run.tensors import same_values
from traceproof.stacks import TRUTHS, GroundTruth
from traceproof.testgen.support.trial import REFERENCE, Trial

FIGURES = ("max_abs", "mean_abs", "max_rel", "mean_rel", "cosine", "mse", "hit_ratio")


class ReferenceTests:
    """Tests of one definition's reference.

    Every test takes a trial: one case, drawn and solved once for all tests of the class. `trial` is an ordinary
    case, `edge_trial` an edge or adversarial one, `cheap_trial` the cheapest.
    """

    definition_name: ClassVar[str]
    definition_file: ClassVar[str]
    constants: ClassVar[Mapping[str, int | float]]
    test_sizes: ClassVar[tuple[str, ...]] = ("small", "medium")
    tolerance: ClassVar[float | None] = None

    def test_constants(self, cheap_trial: Trial) -> None:
        """The definition has the constants that it had when its tests were written, and its sources agree on them.

        What the reference alone states (an eps), the oracle takes from there: only here a change shows.
        """
        definition = cheap_trial.definition
        assert not definition.constants.conflicts
        assert {**definition.const_axes, **assigned(definition.reference)} == self.constants

    def test_output_shape(self, trial: Trial) -> None:
        """Every output is there, none too many, each in the shape that the definition's axes give."""
        assert not trial.reference.surplus
        found = {name: tuple(value.shape) for name, value in trial.reference.outputs.items()}
        assert found == {name: trial.shape(name) for name in trial.definition.outputs}

    def test_output_dtype(self, trial: Trial) -> None:
        """Every output has the definition's dtype."""
        tensors = {name: spec for name, spec in trial.definition.outputs.items() if spec.shape is not None}
        found = {name: trial.reference.outputs[name].dtype for name in tensors}
        assert found == {name: TORCH_DTYPES[spec.dtype] for name, spec in tensors.items()}

    def test_correctness(self, trial: Trial, tolerance: float | None) -> None:
        """The reference agrees with the float64 oracle, by the gates calibrated for each output."""
        check(trial, tolerance)

    def test_specification(self, trial: Trial, tolerance: float | None) -> None:
        """The specification's tolerance holds wherever a naive computation at that precision can meet it."""
        need_oracle(trial)
        outside = {
            name: ruling
            for name, ruling in trial.rulings(REFERENCE, tolerance).items()
            if not ruling.details.get("metrics", {}).get("within_specification", True)
            and trial.baseline_within(name, tolerance)
        }
        if outside:
            pytest.fail(report(trial, outside, REFERENCE, "oracle"), pytrace=False)

    def test_ground_truths_match(self, trial: Trial, tolerance: float | None) -> None:
        """All ground truths that run here agree with each other."""
        found = {stack: trial.run_truth(stack) for stack in TRUTHS}
        outputs = {stack: value for stack, value in found.items() if not isinstance(value, Unavailable)}
        if len(outputs) < 2:
            lacking = [f"{s}: {v.reason}: {v.message}" for s, v in found.items() if isinstance(v, Unavailable)]
            pytest.skip(f"needs two ground truths, {len(outputs)} run here; {'; '.join(lacking)}")
        for stack in outputs:
            fail_on(trial, trial.rulings(stack, tolerance), stack, "oracle")
        for one, other in combinations(outputs, 2):
            fail_on(trial, direct(trial, outputs[one], outputs[other], tolerance), one, other)

    def test_determinism(self, cheap_trial: Trial) -> None:
        """A second run on the same inputs gives the same bits, one on other inputs does not."""
        first = cheap_trial.reference.outputs
        again = cheap_trial.run_reference(fresh=True).outputs
        varying = [name for name, value in first.items() if not same_values(value, again[name])]
        assert not varying, f"a second run on the same inputs gave other bits in {varying}"
        other = cheap_trial.run_reference(cheap_trial.case.seed + OTHER_SEED).outputs
        remembered = [name for name, value in first.items() if same_values(value, other[name])]
        all_the_same = len(remembered) == len(first) and cheap_trial.tells_apart(OTHER_SEED)
        assert not all_the_same, f"other inputs gave the same bits in {remembered}"

    def test_conduct(self, cheap_trial: Trial) -> None:
        """The reference leaves its inputs as they are and returns memory of its own."""
        assert not list(misconduct(**cheap_trial.reference.facts))

    def test_edge_cases(self, edge_trial: Trial, tolerance: float | None) -> None:
        """Edge and adversarial cases: shape, dtype, NaN and infinities, numerics."""
        check(edge_trial, tolerance)


def _versus(truth: GroundTruth) -> Callable[[ReferenceTests, Trial, float | None], None]:
    def test(self: ReferenceTests, trial: Trial, tolerance: float | None) -> None:
        del self
        against(trial, truth.name, tolerance)

    test.__doc__ = f"The reference agrees with {truth.calls}."
    return test


for _truth in TRUTHS.values():
    setattr(ReferenceTests, f"test_correctness_vs_{_truth.name}", _versus(_truth))


def run(file: str) -> None:
    """Run a test file started as a script, with its options. Raises SystemExit: always, with pytest's code."""
    sys.exit(pytest.main([file, *sys.argv[1:]]))


def check(trial: Trial, tolerance: float | None) -> None:
    """Fail unless the judge passes every output of the reference; skip what has no oracle."""
    surplus = trial.reference.surplus
    assert not surplus, f"{surplus} are no outputs of the definition"
    rulings = trial.rulings(REFERENCE, tolerance)
    fail_on(trial, rulings, REFERENCE, "oracle")
    if any(ruling.verdict == Verdict.SKIP for ruling in rulings.values()):
        need_oracle(trial)


def need_oracle(trial: Trial) -> None:
    """Skip where there is none, with the reason."""
    if trial.no_oracle is not None:
        pytest.skip(f"no_oracle: {trial.no_oracle}")


def against(trial: Trial, stack: str, tolerance: float | None) -> None:
    """Hold the reference against a ground truth.

    Both are judged by the oracle, which says whose fault a difference is. Where there is no oracle, and as a
    second opinion, they are held against each other by the specification's tolerance.
    """
    truth = trial.run_truth(stack)
    if isinstance(truth, Unavailable):
        pytest.skip(f"{truth.reason}: {truth.message}")
    fail_on(trial, trial.rulings(REFERENCE, tolerance), REFERENCE, "oracle")
    fail_on(trial, trial.rulings(stack, tolerance), stack, "oracle (the reference agrees with it)")
    fail_on(trial, direct(trial, trial.reference.outputs, truth, tolerance), REFERENCE, stack)


def direct(
    trial: Trial, ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], tolerance: float | None
) -> dict[str, Ruling]:
    """Rulings that fail outputs outside the specification's tolerance, wherever two naive answers can meet it.

    Discrete ones have nothing to compare.
    """
    rulings = {}
    for name, spec in trial.definition.outputs.items():
        if not TORCH_DTYPES[spec.dtype].is_floating_point or name not in theirs:
            continue
        ruling = trial.compare(name, ours.get(name), theirs[name], tolerance)
        within = ruling.details.get("metrics", {}).get("within_specification", True)
        verdict = Verdict.PASS if within or not trial.baseline_within(name, tolerance, answers=2) else Verdict.FAIL
        rulings[name] = Ruling(verdict, ruling.reason, "outside the specification's tolerance", ruling.details)
    return rulings


def fail_on(trial: Trial, rulings: Mapping[str, Ruling], implementation: str, other: str) -> None:
    """Fail with the report if any ruling is a failure or an error."""
    bad = {name: r for name, r in rulings.items() if r.verdict not in {Verdict.PASS, Verdict.SKIP}}
    if bad:
        pytest.fail(report(trial, bad, implementation, other), pytrace=False)


def report(trial: Trial, rulings: Mapping[str, Ruling], implementation: str, other: str) -> str:
    """Everything that is known of a failure, the five worst locations among it."""
    case = trial.case
    axes = ", ".join(f"{name} {size}" for name, size in case.axes.items())
    lines = [
        f"{trial.definition.name}, case {case.id} ({axes}; seed {case.seed}) on {trial.device}: {implementation}"
    ]
    for name, ruling in rulings.items():
        lines.append(f"  {name}  {ruling.verdict} {ruling.reason or ''}: {ruling.message}")
        lines += [f"    {line}" for line in _details(ruling.details, implementation, other)]
    return "\n".join(lines)


def _details(details: Mapping[str, Any], implementation: str, other: str) -> Iterable[str]:
    figures = details.get("metrics", {})
    known = [f"{key} {figures[key]:.4g}" for key in FIGURES if isinstance(figures.get(key), int | float)]
    if known:
        yield ", ".join(known)
    if row := details.get("specification"):
        yield f"specification: atol {row['atol']:g}, rtol {row['rtol']:g}, hit ratio {row['hit_ratio']:g}"
    for place in details.get("worst", ()):
        yield f"at {place['index']}: {implementation} {place['actual']}, {other} {place['expected']}"
