"""A reference's float64 shadow: exact where the reference rounds, else refused; ties are open either way."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from definitions import write
from op_support import cases, definitions, function_of, inputs_of, truth
from pipeline import Run, verdicts
from solution_judge import SolutionJudge, candidate, solution_judge

from traceproof.dataset.definition import Definition
from traceproof.judge.output import Ruling, judge_output
from traceproof.ops import registry
from traceproof.ops.cases import Case
from traceproof.ops.compare import Close
from traceproof.ops.generic import GenericOp
from traceproof.run import shadow
from traceproof.run.case import expectation
from traceproof.run.shadow import FLOAT64, OTHER_ORDER, OTHER_TIES
from traceproof.sandbox import Limits


def entries(returned: Any) -> list[tuple[str | None, Any]]:  # noqa: ANN401 - what a function returns
    return [(None, value) for value in (returned if isinstance(returned, tuple) else (returned,))]


def followed(function: Callable[..., Any], *inputs: Any, mode: str = FLOAT64) -> list[Any]:  # noqa: ANN401 - tensors
    return [value for _, value in shadow.run(mode, function, inputs, entries)]


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_every_operation_is_done_in_float64_and_the_output_is_not_rounded() -> None:
    x = values(4, 64)

    def norm(x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)

    wide = x.double()
    exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    (found,) = followed(norm, x)
    assert found.dtype is torch.float64
    assert torch.allclose(found, exact, rtol=1e-15, atol=0)


def test_another_order_rounds_the_other_way_where_it_could() -> None:
    middle = 1 + 2.0**-8  # between two neighbours of bfloat16
    x = torch.tensor([middle * (1 + 2.0**-21), middle * (1 - 2.0**-21), 1.001, middle + 2.0**-12])
    (plain,) = followed(lambda x: x.to(torch.bfloat16).float(), x, mode=OTHER_ORDER)
    rounded = x.to(torch.bfloat16).float()
    assert plain[:2].tolist() == rounded[:2].flip(0).tolist()
    assert torch.equal(plain[2:], rounded[2:])


def test_views_in_place_operations_and_scalars_are_followed() -> None:
    x = values(4, 6, dtype=torch.float32)

    def changes(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        left, right = y.view(2, 2, 6)[0], y.t()[2:]
        left.mul_(0.1).add_(1)
        right.div_(3)
        y[1, 1:3] = y[0, 1:3] * y.abs().max().item()
        return y

    expected = x.double()
    expected[:2] = expected[:2] * 0.1 + 1
    expected[:, 2:] /= 3
    expected[1, 1:3] = expected[0, 1:3] * expected.abs().max()
    (found,) = followed(changes, x)
    assert torch.allclose(found, expected, rtol=1e-14)


def test_memory_that_is_used_again_has_no_shadow_of_what_lay_there() -> None:
    def loop(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(64)
        for step in range(2000):
            total = total + x * (1.0 / (step + 1))
        return total

    x = values(64, dtype=torch.float32)
    (found,) = followed(loop, x)
    expected = x.double() * sum(1.0 / (step + 1) for step in range(2000))
    assert torch.allclose(found, expected, rtol=1e-12)


def test_whole_numbers_that_rounding_may_decide_are_left_out_and_others_stay() -> None:
    def numbers(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.argmax(-1), ids + 1, (x * 4).to(torch.int8)

    ids = torch.arange(3)
    best, moved, packed = followed(numbers, values(3, 5), ids)
    assert best is None
    assert packed is None
    assert torch.equal(moved, ids + 1)


def _accepted(target: torch.Tensor, draft: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts whose target is at least as likely; and their lengths, which nothing floating decides."""
    lengths = ids + 1
    out = torch.full_like(ids, -1)
    for row, one in enumerate(ids.tolist()):
        out[row] = one if target[row, one] >= draft[row, one] else int(target[row].argmax())
    return lengths, out


def _branched(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([1, 2]) if float(x.sum()) > 0 else torch.tensor([3, 4])


def _equal(x: torch.Tensor) -> torch.Tensor:
    return torch.full((2,), 7 if torch.equal(x.float(), x.float() + 1) else 8)


def test_whole_numbers_that_python_decides_by_floating_ones_are_left_out() -> None:
    x = values(3, 5)
    lengths, out = followed(_accepted, x, x.flip(0), torch.arange(3))
    assert torch.equal(lengths, torch.arange(3) + 1)
    assert out is None
    assert followed(_branched, x) == [None]
    assert followed(_equal, x) == [None]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.float().view(torch.int32), "bits"),
        (lambda x: torch.multinomial(x.float().abs(), 1), "draws at random"),
        (lambda x: torch.view_as_complex(x.float().view(-1, 2)), "complex"),
    ],
)
def test_what_can_not_be_followed_is_refused(function: Callable[[torch.Tensor], torch.Tensor], why: str) -> None:
    with pytest.raises(shadow.UnsupportedError, match=why):
        followed(function, values(4, 8))


def test_another_order_of_summation_changes_rounding_and_nothing_else() -> None:
    x, y = values(32, 4096, dtype=torch.float32), values(4096, 16, dtype=torch.float32)

    def sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ y, x.sum(-1), torch.softmax(x, -1), x.mean()

    for plain, other in zip(sums(x, y), followed(sums, x, y, mode=OTHER_ORDER), strict=True):
        assert other.shape == plain.shape
        assert torch.allclose(other, plain, rtol=1e-3, atol=1e-3)
    assert not torch.equal(followed(sums, x, y, mode=OTHER_ORDER)[0], x @ y)


def test_following_imports_no_compiler() -> None:
    program = (
        "import sys, torch, warnings\n"
        "warnings.simplefilter('error', UserWarning)\n"
        "from traceproof.run import shadow\n"
        "x = torch.linspace(-3, 3, 96).bfloat16()\n"
        "def gated(x): return torch.nn.functional.silu(x.float() * 1.1).to(torch.bfloat16)\n"
        "for mode in sys.argv[1:]: shadow.run(mode, gated, [x], lambda y: [('y', y)])\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([forked.interpreter(), "-c", program, FLOAT64, OTHER_ORDER], check=True)


LIMITS = Limits(seconds=300.0, setup_seconds=300.0)
FLOATING = [
    definition
    for op_type in registry.known()
    for definition in definitions(op_type)
    if any(
        isinstance(registry.get(op_type).of_form(definition).comparisons(definition)[name], Close)
        and getattr(torch, str(spec.dtype), torch.uint8).is_floating_point
        for name, spec in definition.outputs.items()
    )
]


@pytest.mark.parametrize("definition", FLOATING, ids=lambda one: one.name)
def test_the_shadow_of_a_right_reference_is_what_the_oracle_says(definition: Definition) -> None:
    op = registry.get(definition.op_type).of_form(definition)
    case = cases(definition, "small")[0]
    inputs = inputs_of(definition, case)
    known = truth(definition, inputs)
    run = function_of(definition)

    def given() -> list[Any]:  # a reference may write to what it is given
        return [one.clone() if isinstance(one, torch.Tensor) else one for one in inputs.values()]

    plain = dict(zip(definition.outputs, [value for _, value in entries(run(*given()))], strict=True))
    found = dict(zip(definition.outputs, followed(run, *given()), strict=True))
    compared = 0
    kinds = op.comparisons(definition)
    for name, kind in ((name, kinds[name]) for name in definition.outputs):
        # A code that is a whole number is rounded by an operation, which the shadow keeps.
        if isinstance(kind, Close) and plain[name].dtype.is_floating_point:
            oracle = known[name].double()
            off, lost = (float((one[name].double() - oracle).abs().max()) for one in (found, plain))
            assert off <= 1e-13 * float(oracle.abs().max()), (name, off)
            assert off < lost / 1000 or off == lost == 0, (name, off, lost)  # of copies nothing is lost
            compared += 1
    assert compared


def own(tmp_path: Path, body: str, **changes: Any) -> Mapping[str, Any]:  # noqa: ANN401 - JSON
    """What comes of a reference of an op_type that nobody knows."""
    tensor = {"shape": ["rows", "width"], "dtype": "bfloat16"}
    given = {"inputs": {"x": tensor}, "outputs": {"y": tensor}}
    reference = f"import torch\n\n\ndef run(x):\n    {body}\n"
    write(tmp_path / "dataset", RENORM | {"name": "one", "reference": reference} | given | changes)
    rows = Run(tmp_path / "dataset", tmp_path / "out", limits=LIMITS).verify()["one"]
    return {"rows": rows, "verdicts": verdicts(rows), "against": {row["against"] for row in rows}}


@pytest.mark.slow
def test_a_reference_of_an_unknown_op_type_is_held_against_its_shadow(tmp_path: Path) -> None:
    found = own(tmp_path, "return torch.softmax(x.float(), -1).to(torch.bfloat16)")
    assert found["verdicts"] == {("pass", None)}
    assert found["against"] == {"shadow"}
    assert {row["gate"]["kind"] for row in found["rows"] if row["output"] == "y"} == {"baseline"}


@pytest.mark.parametrize("op_type", ["unheard_of", "gdn"])  # and of a form that its op does not know
def test_a_reference_that_overflows_where_float64_does_not_fails(op_type: str, tmp_path: Path) -> None:
    body = "y = x.half() * 30000; return (y / 30000).to(torch.bfloat16)"
    assert ("fail", "infinity") in own(tmp_path, body, op_type=op_type)["verdicts"]


def test_a_reference_that_takes_bits_is_not_verified_and_says_why(tmp_path: Path) -> None:
    found = own(tmp_path, "return (x.float().view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)")
    unjudged = [row for row in found["rows"] if row["output"] == "y"]
    assert {(row["verdict"], row["reason"]) for row in unjudged} == {("skip", "no_oracle")}
    assert all("no float64 shadow: a tensor's bits" in row["message"] for row in unjudged)


Y = {"y": {"shape": ["rows", "packed"], "dtype": "float32"}}
FLAT = {"y": {"shape": ["rows"], "dtype": "float32"}}


@pytest.mark.parametrize(
    "changes",
    [
        {},  # an input that is an output is modified and given back
        {"outputs": Y, "reference": "def _scaled(cache):\n    return cache[:, None].repeat(1, 11) * 0.1\n"},
        {"outputs": FLAT, "reference": "def _scaled(cache):\n    return cache * 0\n"},
    ],
    ids=["in place", "a size that nothing fixes", "no two different elements"],
)
def test_a_dumped_trace_that_scales_a_buffer_passes(tmp_path: Path, changes: dict[str, Any]) -> None:
    cache = {"cache": {"shape": ["rows"], "dtype": "float32"}}
    definition: dict[str, Any] = {"name": "scaled", "op_type": "unheard_of", "check": ""}
    definition |= {"tags": ["fi_api:flashinfer.unheard_of"], "inputs": cache, "outputs": cache}
    definition |= {"axes": {"rows": {"type": "var"}, "packed": {"type": "var"}}}
    definition |= {"reference": "def _scaled(cache):\n    cache.mul_(0.1)\n"}
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "scaled.json").write_text(json.dumps(definition | changes))
    rows = Run(tmp_path / "dump", tmp_path / "out", limits=LIMITS).verify()["scaled"]
    assert verdicts(rows) == {("pass", None)}


TOP_P = """
def run(probs, top_p):
    ordered, places = torch.sort(probs, dim=-1, descending=True)
    kept = (ordered.cumsum(-1) - ordered) < float(top_p)
    kept = torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, places, kept)
    left = torch.where(kept, probs, torch.zeros_like(probs))
    return left / left.sum(-1, keepdim=True)
"""
WIDTH = 64
ROW = {"shape": ["rows", "width"], "dtype": "float32"}
RENORM: dict[str, Any] = {
    "name": "renorm",
    "op_type": "unheard_of",
    "axes": {"rows": {"type": "var"}, "width": {"type": "const", "value": WIDTH}},
    "inputs": {"probs": ROW, "top_p": {"shape": None, "dtype": "float32"}},
    "outputs": {"y": ROW},
    "reference": f"import torch\n\n{TOP_P}",
}
P = 0.5
Kernel = Callable[[torch.Tensor, float], torch.Tensor]


def top_p(probs: torch.Tensor, p: float) -> torch.Tensor:
    """The reference."""
    space: dict[str, Any] = {"torch": torch}
    exec(TOP_P, space)  # noqa: S102 - ours
    found: torch.Tensor = space["run"](probs, p)
    return found


def by_threshold(probs: torch.Tensor, p: float) -> torch.Tensor:
    """Keeps all that are as probable as the last one kept."""
    ordered = probs.sort(dim=-1, descending=True).values
    last = ((ordered.cumsum(-1) - ordered) < p).sum(-1, keepdim=True) - 1
    left = torch.where(probs >= ordered.gather(-1, last), probs, 0.0)
    return left / left.sum(-1, keepdim=True)


def other_equals(probs: torch.Tensor, p: float) -> torch.Tensor:
    """Orders equal values the other way."""
    return top_p(probs.flip(-1), p).flip(-1)


def probabilities(tied: int, rows: int = 3) -> torch.Tensor:
    """Rows of unlike probabilities; in the first `tied` the bound falls between two equal ones."""
    generator = torch.Generator().manual_seed(3)
    found: list[torch.Tensor] = []
    while len(found) < rows:
        row = torch.softmax(torch.randn(WIDTH, generator=generator), -1)
        if len(found) < tied:
            places = row.argsort(descending=True)
            last = int((top_p(row[None], P) > 0).sum())
            row[places[last - 1 : last + 1]] = row[places[last - 1 : last + 1]].mean()
        if torch.equal(top_p(row[None], P), other_equals(row[None], P)) is (len(found) >= tied):
            found.append(row)
    return torch.stack(found)


def ruled(kernel: Kernel, probs: torch.Tensor, *, reference: bool = False) -> Ruling:
    """What the judge says of a kernel, given the shadows of the reference."""
    definition = Definition.model_validate(RENORM)
    entries = {
        beside: followed(top_p, probs, P, mode=mode)[0]
        for beside, mode in (("", FLOAT64), ("baseline", OTHER_ORDER), (OTHER_TIES, OTHER_TIES))
    }
    op, case = GenericOp("unheard_of"), Case("one", "small", {"rows": len(probs)}, 0, {})
    expected = expectation(definition, op, case, "y", entries, reference=reference)
    return judge_output(kernel(probs, P), expected, tolerance=None)


def test_equal_values_are_taken_in_the_other_order_and_unlike_ones_as_before() -> None:
    x = torch.tensor([[3.0, 1.0, 3.0, 2.0, 3.0]])

    def places(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        marks = torch.arange(5.0)
        found = (
            x.sort(-1, descending=True).indices,
            x.argsort(-1),
            x.topk(2).indices,
            x.topk(2, largest=False).indices,
            x.sort(dim=-1, stable=True).indices,
        )
        return tuple(marks[one] for one in found)

    found = [one.tolist() for one in followed(places, x, mode=OTHER_TIES)]
    assert found == [[[4, 2, 0, 3, 1]], [[1, 3, 4, 2, 0]], [[4, 2]], [[1, 3]], [[1, 3, 0, 2, 4]]]


RIGHT: list[Kernel] = [top_p, by_threshold, other_equals]


@pytest.mark.parametrize("kernel", RIGHT)
@pytest.mark.parametrize("tied", [0, 1, 2])
def test_whichever_equals_a_right_kernel_takes_it_passes(kernel: Kernel, tied: int) -> None:
    found = ruled(kernel, probabilities(tied))
    assert found.verdict == "pass", found.message
    assert (f"{tied} of 3 rows follow" in found.message) == bool(tied)


@pytest.mark.parametrize("kernel", RIGHT)
def test_where_all_rows_are_open_nothing_is_verified(kernel: Kernel) -> None:
    found = ruled(kernel, probabilities(3))
    assert (found.verdict, found.reason) == ("skip", "no_oracle")


def test_the_reference_orders_equals_as_its_shadow_does_and_is_judged_whole() -> None:
    assert ruled(top_p, probabilities(3), reference=True).verdict == "pass"
    assert ruled(by_threshold, probabilities(3), reference=True).verdict == "fail"


WRONG: dict[str, Kernel] = {
    "p x 0.9": lambda probs, p: top_p(probs, 0.9 * p),
    "p ignored": lambda probs, _: top_p(probs, 1.0),
    "not renormalised": lambda probs, p: torch.where(top_p(probs, p) > 0, probs, 0.0),
    "x 1.001": lambda probs, p: top_p(probs, p) * 1.001,
    "zeros": lambda probs, _: torch.zeros_like(probs),
    "NaN": lambda probs, _: torch.full_like(probs, torch.nan),
    "rows shifted": lambda probs, p: top_p(probs, p).roll(1, 0),
    "one token off": lambda probs, p: top_p(probs, p).roll(1, -1),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("tied", [0, 1, 2])
def test_a_wrong_kernel_fails_by_the_rows_that_are_not_open(wrong: str, tied: int) -> None:
    assert ruled(WRONG[wrong], probabilities(tied)).verdict == "fail"


def wrong_in_open_rows(wrong: str) -> Ruling:
    """What the judge says of a kernel that is wrong in the one open row of three."""

    def half(probs: torch.Tensor, p: float) -> torch.Tensor:
        return torch.cat([WRONG[wrong](probs[:1], p), top_p(probs[1:], p)])

    return ruled(half, probabilities(1))


@pytest.mark.parametrize("wrong", ["zeros", "p ignored", "one token off"])
def test_a_kernel_that_is_wrong_in_open_rows_alone_does_not_pass(wrong: str) -> None:
    found = wrong_in_open_rows(wrong)
    assert (found.verdict, found.reason) == ("skip", "no_oracle")
    assert "far from what it gives" in found.message


def test_nan_that_no_order_of_equals_gives_fails_in_open_rows_too() -> None:
    found = wrong_in_open_rows("NaN")
    assert (found.verdict, found.reason) == ("fail", "nan")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SolutionJudge]:
    root = tmp_path_factory.mktemp("ties")
    write(root, RENORM)
    with solution_judge(tmp_path_factory.mktemp("judging"), dataset=root) as found:
        yield found


THRESHOLD = """
import torch

def run(probs, top_p):
    ordered = probs.sort(dim=-1, descending=True).values
    last = ((ordered.cumsum(-1) - ordered) < float(top_p)).sum(-1, keepdim=True) - 1
    left = torch.where(probs >= ordered.gather(-1, last.clamp_min(0)), probs, 0.0)
    return left / left.sum(-1, keepdim=True){}
"""


@pytest.mark.parametrize(("wrong", "accepted"), [("", True), (" * 1.001", False)])
def test_one_that_keeps_all_equals_is_accepted(wrong: str, *, accepted: bool, judged: SolutionJudge) -> None:
    reasons = judged.reasons(candidate("one", THRESHOLD.format(wrong)), "renorm")
    assert (reasons == []) is accepted, reasons
