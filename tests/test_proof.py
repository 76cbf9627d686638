"""What a run says at its end: on what it compared, against which ground truths, and what it could not reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pipeline import summarise, told

from traceproof.reasons import Skip
from traceproof.run import proof
from traceproof.run.known import Known
from traceproof.run.report import table

GPU = {"device_type": "cuda", "device": "NVIDIA H200", "capability": "9.0"}
STACKS: Sequence[Mapping[str, Any]] = (
    {"stack": "torch", "versions": {"torch": "2.14.1"}, **GPU},
    {"stack": "flashinfer", "versions": {"flashinfer-python": "0.7.2.post1", "torch": "2.14.1"}, **GPU},
)


def row(
    definition: str, implementation: str, verdict: str = "pass", *, reason: str | None = None
) -> dict[str, Any]:
    return {
        "definition": definition,
        "op_type": definition.partition("_")[0],
        "case": "small-0",
        "implementation": implementation,
        "output": "output",
        "verdict": verdict,
        "reason": reason,
        "message": "",
        "repeat": "",
    }


def ending(*rows: dict[str, Any], stacks: Sequence[Mapping[str, Any]] = STACKS) -> list[str]:
    lines = table(summarise(rows, Known(), stacks)).splitlines()
    start = next(number for number, line in enumerate(lines) if "VERIFIED" in line)
    return lines[start + 1 :]


def test_a_gpu_and_the_ground_truths_are_named_with_their_versions() -> None:
    rows = [row("gqa_a", implementation) for implementation in ("reference", "flashinfer")]
    assert ending(*rows) == [
        "Proved on SM 9.0 (NVIDIA H200) with FlashInfer 0.7.2.post1: 1 of 1 definitions against a ground truth."
    ]


def test_what_had_no_ground_truth_here_is_named_with_the_reason() -> None:
    rows = [row("norm_a", "reference"), row("norm_a", "torch")]
    for name in ("gdn_a", "gdn_b", "gdn_c"):
        rows += [row(name, "reference"), row(name, "flashinfer", "skip", reason=Skip.NO_CUDA)]
    rows += [
        row("moe_a", implementation, "skip", reason=Skip.DOES_NOT_FIT)
        for implementation in ("reference", "flashinfer")
    ]
    stacks = [{"stack": "torch", "versions": {"torch": "2"}, "device_type": "cpu", "capability": None}]
    proved, unreached = ending(*rows, stacks=stacks)
    start, _, counts = proved.partition(": ")
    assert start == "Proved on the CPU with PyTorch 2"
    assert counts == (
        "1 of 5 definitions against a ground truth, 3 against the float64 oracle alone; not proved: 1 not run."
    )
    assert unreached == (
        "Without a ground truth here: moe_a (larger than limits.memory_gb); all 3 of gdn (needs a GPU)."
    )


def test_a_reference_with_a_finding_is_not_proved_one_whose_ground_truth_has_it_is() -> None:
    rows = [row("gqa_a", "reference", "fail", reason="nan"), row("gqa_a", "flashinfer")]
    rows += [row("gqa_b", "reference"), row("gqa_b", "flashinfer", "fail", reason="nan")]
    (line,) = ending(*rows)
    assert line.endswith(": 1 of 2 definitions against a ground truth; not proved: 1 with findings.")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([row("a_a", "reference"), row("a_a", "fla", "error", reason="timeout")], proof.ERROR),
        ([row("a_a", "reference", "error", reason="crash"), row("a_a", "fla")], proof.ERROR),
        ([row("a_a", "reference")], proof.NO_TRUTH),
        ([row("a_a", "reference") | {"case": None, "verdict": "error"}], proof.UNREADABLE),
        (
            [
                row("a_a", "reference"),
                row("a_a", "fla", "skip", reason=Skip.NO_ADAPTER),
                row("a_a", "flashinfer", "skip", reason=Skip.NEEDS_SM),
            ],
            Skip.NEEDS_SM,
        ),
    ],
)
def test_the_reason_that_is_told_is_the_one_nearest_to_a_verdict(rows: list[dict[str, Any]], reason: str) -> None:
    assert told(summarise(rows, Known(), STACKS), "unmet") == {"a_a": reason}


def test_every_reason_to_skip_has_words() -> None:
    assert set(Skip) <= proof.WHY.keys()
