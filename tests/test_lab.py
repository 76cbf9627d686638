"""The lab: metamorphic relations, mutants of references, what a dumped reference lacks, error rates."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import definitions as small
import forked
import op_support as ops
import pytest
import torch

import references
import sanitize
from calibrate import Rates, Tally, main, measure
from dumped_source import completed
from metamorphic import cases_of, try_relation
from mutants import Mutant, mutants, plain
from mutate import Fate, Trial
from relations.building import Relation
from relations.op_types import RELATIONS, relations_of
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_file
from traceproof.judge.gates import Gate, gate_of
from traceproof.ops import registry
from traceproof.ops.batch import batch_of
from traceproof.ops.compare import Backward, Close, Quantised
from traceproof.ops.families.expert import MOE
from traceproof.ops.families.norm import RMSNORM
from traceproof.ops.families.product import GEMM
from traceproof.ops.formula import Mutant as OpMutant
from traceproof.run.case import SolvedCase, solve
from traceproof.run.untrusted import loaded
from traceproof.sandbox import Limits, Pool

# One of each op_type, of its main form where there is one.
OWN = [
    min(own, key=lambda one: not registry.get(one.op_type).of_form(one).family)
    for op_type in registry.known()
    if (own := ops.definitions(op_type))
]
DECODE = ops.load("gqa_paged", "gqa_paged_decode_h40_kv8_d128_ps16")
PREFILL = ops.load("gdn", "gdn_prefill_qk2_v4_d32_k_last")
POOL: list[Pool] = []
CASES = ("small-1", "edge-empty-row", "edge-empty-sequence", "edge-no-state", "adversarial-rows")


def subjects(definition: Definition, *names: str) -> list[SolvedCase]:
    """A few cases, drawn and solved."""
    return [solve(definition, case) for case in cases_of(definition, 0) if case.id in (names or CASES)]


@pytest.fixture(scope="module", autouse=True)
def workers(pool: Pool) -> Iterator[None]:
    POOL.append(pool)
    yield
    POOL.clear()


def tried(definition: Definition, relations: Iterable[Relation], cases: list[SolvedCase]) -> list[dict[str, Any]]:
    """What becomes of relations."""
    with loaded(definition, POOL[0], limits=Limits(seconds=300)) as source:
        return [try_relation(relation, cases, source) for relation in relations]


def broken(definition: Definition, *names: str) -> set[str]:
    """The relations that a reference breaks."""
    found = tried(definition, relations_of(definition), subjects(definition, *names))
    return {row["relation"] for row in found if row["agreement"] == "broken"}


def changed(definition: Definition, old: str, new: str) -> Definition:
    """The definition with a planted violation in its reference."""
    assert old in definition.reference
    return definition.model_copy(update={"reference": definition.reference.replace(old, new)})


def norm(body: str) -> Definition:
    return Definition.model_validate(small.rmsnorm("rmsnorm_h32", small.GOOD.replace("    return (", body)))


def test_every_op_type_with_an_oracle_has_relations() -> None:
    assert RELATIONS.keys() <= set(registry.known())
    assert all(relations_of(definition) for definition in OWN)


@pytest.mark.slow
@pytest.mark.parametrize("definition", OWN, ids=lambda definition: definition.name)
def test_right_references_keep_their_relations(definition: Definition) -> None:
    cases = subjects(definition)
    found = tried(definition, relations_of(definition), cases)
    assert not [row for row in found if row["agreement"] == "broken" or row["failing"]]
    # Of any op_type: those of a batch, if it has parts, of which one holds where these are not independent.
    batch = 2 - registry.get(definition.op_type).coupled if any(map(batch_of, cases)) else 0
    copied = "lse" not in definition.outputs and definition.outputs.keys() <= {"k_out", "key", "value"}
    assert sum(row["cases"] > 0 for row in found) >= (
        3 if definition.op_type in RELATIONS and not copied else batch
    )


GROUPED = "q[row].float().reshape(num_kv_heads, -1, head_dim)"
CROSSED = "q[row].float().reshape(-1, num_kv_heads, head_dim).transpose(0, 1)"
MERGED = "KV split and merged by LSE"
BATCH = {"batch order", "batch split and concatenated"}
SAMPLER = ops.load("sampling", "top_k_sampling_from_probs_v1000")
EXPERTS = ops.load("moe", "trtllm_fp4_block_scale_routed_moe_topk4_e16_h512_i256")
STATE = PREFILL.reference.rsplit("return output, ", 1)[1].split()[0]
LOST = " * ~(cu_seqlens[1:] == cu_seqlens[:-1])[:, None, None, None]"
# What is planted, in which case it shows, and the relations that it breaks.
PLANTED: dict[str, tuple[Definition, str, set[str]]] = {
    "place in the batch": (norm("    y = y * (1 + 0.1 * torch.arange(len(y))[:, None])\n    return ("), "", BATCH),
    "size of the batch": (norm("    y = y * len(y)\n    return ("), "", {"batch split and concatenated"}),
    "pages": (changed(DECODE, "].long()", "].long().sort().values"), "medium-0", {"pages permuted", MERGED}),
    "natural logarithm": (changed(DECODE, " / math.log(2.0)", ""), "", {MERGED, "softmax shift"}),
    "scale": (changed(DECODE, "* sm_scale", "* 0.08"), "", {"q doubled, softmax scale halved", "softmax shift"}),
    "head map": (changed(DECODE, GROUPED, CROSSED), "", {"heads permuted", "softmax shift"}),
    "large eps": (changed(norm("    return ("), "1e-6", "1e4"), "", {"x doubled, far from eps"}),
    "state of an empty sequence": (
        changed(PREFILL, f"return output, {STATE}", f"return output, {STATE}{LOST}"),
        "edge-empty-sequence",
        {"cut in time, state handed on"},
    ),
    "preferred row": (
        changed(
            SAMPLER, "        picked = ", "        weights = weights if row else weights ** 8\n        picked = "
        ),
        "medium-0",
        {"rows permuted"},
    ),
    "weight of an expert": (
        changed(EXPERTS, "result * weights", "result * (1 + local / 16) * weights"),
        "",
        {"experts permuted"},
    ),
}


@pytest.mark.parametrize(("definition", "case", "relations"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_breaks_its_relation(definition: Definition, case: str, relations: set[str]) -> None:
    assert broken(definition, *filter(None, [case])) == relations


LIMITS = Limits(seconds=300, setup_seconds=300)

# Its mutants have every fate: the exponent is killed, the axis is another name for itself, the last factor is lost
# in bfloat16's rounding, and the branch waits for a batch that no case has.
REFERENCE = '''
import torch


def run(hidden_states, weight):
    """Words that say nothing to a machine."""
    EPS = 1e-6
    assert hidden_states.shape[1] == 32
    x = hidden_states.float()
    y = x * torch.rsqrt((x ** 2).mean(-1, keepdim=True) + EPS)
    if len(x) > 100000:
        y = y + 1
    return (y * weight.float() * 1.0001).to(torch.bfloat16)
'''


def definition(reference: str = REFERENCE) -> Definition:
    return Definition.model_validate(small.rmsnorm("rmsnorm_h32", reference))


def found(what: str, operator: str = "") -> Mutant:
    return next(it for it in mutants(REFERENCE) if what in it.what and operator in it.operator)


@pytest.fixture(scope="module")
def trial(pool: Pool) -> Trial:
    return Trial(definition(), pool, sizes=("small", "medium"), seed=0, limits=LIMITS)


def test_mutants_differ_from_the_reference_and_from_each_other() -> None:
    sources = [mutant.source for mutant in mutants(REFERENCE)]
    assert len(sources) == len(set(sources)) > 10
    assert ast.unparse(plain(REFERENCE)) not in sources
    for source in sources:
        ast.parse(source)


@pytest.mark.parametrize(
    ("code", "operator", "what", "becomes"),
    [
        ("a = b + 1", "operator", "Add -> Sub", "a = b - 1"),
        ("a = b + 1", "constant", "1 -> 2", "a = b + 2"),
        ("a = b / c", "operands", "operands of Div swapped", "a = c / b"),
        ("a = b[1:n]", "slice", "upper n dropped", "a = b[1:]"),
        ("a = b < c", "comparison", "Lt -> LtE", "a = b <= c"),
        ("a = -b", "operator", "USub dropped", "a = +b"),
        ("a = b.T", "axes", ".T dropped", "a = b.mT.mT"),
        ("a = b.amax(0)", "function", "amax -> amin", "a = b.amin(0)"),
        ("a = torch.float32", "dtype", "float32 -> bfloat16", "a = torch.bfloat16"),
        ("a = where(b, c)", "operands", "arguments of where swapped", "a = where(c, b)"),
        ("a = b.flip(0)", "call", ".flip() dropped", "a = b.detach()"),
    ],
)
def test_each_kind_of_change(code: str, operator: str, what: str, becomes: str) -> None:
    changes = {(mutant.operator, mutant.what): mutant.source for mutant in mutants(code)}
    assert changes[operator, what] == becomes


@pytest.mark.parametrize(
    ("what", "operator", "fate"),
    [
        ("2 -> 3", "constant", Fate.KILLED),
        ("mean -> sum", "function", Fate.KILLED),
        ("1e-06 -> 2e-06", "constant", Fate.KILLED),
        ("USub dropped", "operator", Fate.EQUIVALENT),  # axis -1 of two is axis 1
        ("100000 -> 100001", "constant", Fate.EQUIVALENT),
        ("dropped: 'y = y + 1'", "statement", Fate.EQUIVALENT),
        ("1.0001 -> 1.1", "constant", Fate.KILLED),
    ],
)
def test_what_becomes_of_a_mutant(trial: Trial, what: str, operator: str, fate: Fate) -> None:
    mutant = found(what, operator)
    assert trial.run(mutant)["fate"] == fate


FILES = {
    "__init__.py": "",
    "helpers.py": (
        "import math as m\nfrom .numbers import HALF as PART\nfrom functools import lru_cache\n\n"
        "def kernel(x):\n    import ctypes\n    return ctypes.c_float(x)\n\n"
        "@lru_cache\ndef shift(x: 'Shift') -> 'Shift':\n    return m.floor(x) + PART\n"
    ),
    "modes.py": (
        "from enum import IntEnum\n\n\nclass Mode(IntEnum):\n    ONE = 1\n    TWO = 2\n\n"
        "    def known(self):\n        return self in KNOWN\n\n\nKNOWN = frozenset([Mode.TWO])\n"
    ),
    "numbers.py": "HALF = (\n    0.5\n)\n",
    "templates.py": (
        "from made_up.helpers import kernel, shift as moved\nfrom made_up.modes import Mode\n\n"
        "def _scaled(x):\n    from .helpers import shift\n    total = moved(x) + shift(x)\n    return total\n\n"
        "def _kernel_reference(x):\n    return x * 2\n\n"
        "def _init(x):\n    return {'x': kernel(x)}\n\n"
        "def _choosing(x):\n    if x > 9:\n        from .helpers import kernel\n        return kernel(x)\n"
        "    return x + 1\n\n"
        "def _moded(x, mode=Mode.TWO.value):\n    return Mode(mode).known()\n"
    ),
}


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401 - a module
    (tmp_path / "made_up").mkdir()
    for name, text in FILES.items():
        (tmp_path / "made_up" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "made_up"]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("made_up.templates")


def dumped(templates: Any) -> tuple[dict[str, str], Any]:  # noqa: ANN401 - a module, a template
    head = "from __future__ import annotations\nimport math\n\n"
    source = FILES["templates.py"].split("\n\n")
    made = {"reference": head + source[1] + "\n", "init": head + source[3]}
    return made, SimpleNamespace(reference=templates._scaled, init=templates._init)


def ran(text: str, name: str, value: float) -> Any:  # noqa: ANN401 - what it returns
    module: dict[str, Any] = {}
    exec(text, module)  # noqa: S102 - written above
    return module[name](value)


def test_functions_constants_and_imports_stand_in_front_of_a_reference(templates: Any) -> None:  # noqa: ANN401
    made, template = dumped(templates)
    found, told = completed(made, template, "made_up", {})
    assert "made_up" not in found["reference"]
    assert ran(found["reference"], "_scaled", 3.5) == 7.0
    assert any(line.startswith("reference: ") for line in told)


def test_what_needs_more_than_torch_stays_as_it_is(templates: Any) -> None:  # noqa: ANN401 - a module
    made, template = dumped(templates)
    found, told = completed(made, template, "made_up", {})
    assert found["init"] == made["init"]
    assert "init stays as it is: it needs ctypes" in told


def test_a_kernel_that_has_a_template_is_its_template_s_reference(templates: Any) -> None:  # noqa: ANN401 - a module
    made, template = dumped(templates)
    helpers = importlib.import_module("made_up.helpers")
    found, _ = completed(made, template, "made_up", {helpers.kernel: templates._kernel_reference})
    assert ran(found["init"], "_init", 4.0) == {"x": 8.0}


NORM = ops.load("rmsnorm", "rmsnorm_h96")


def rates(definition: Definition) -> Rates:
    return measure(definition, 0, sizes=("small",))


def share(found: Rates, kind: str) -> float:
    """How much of the wrong, or of the right answers, is refused."""
    answers: dict[str, Tally] = getattr(found, kind)
    tallies = [tally for tally in answers.values() if tally.runs]
    return sum(tally.refused for tally in tallies) / sum(tally.runs for tally in tallies)


@pytest.mark.parametrize(
    ("op", "definition", "loose"),
    [
        (RMSNORM, NORM, {"output": Close(200.0)}),
        (GEMM, ops.load("gemm", "gemm_n96_k160"), {"C": Backward(1e6)}),
        (
            MOE,
            ops.load("moe", "trtllm_fp8_per_tensor_scale_moe_topk1_e16_h512_i512"),
            {"output": Quantised(rms=10.0, slope=1.0)},
        ),
    ],
    ids=["close", "backward", "quantised"],
)
def test_a_loosened_gate_lets_wrong_answers_through(
    op: object, definition: Definition, loose: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "comparisons", lambda *_: loose)
    found = rates(definition)
    assert share(found, "right") == 0.0
    assert 0.2 < share(found, "wrong") < 0.95


def test_a_gate_that_refuses_all_is_seen_in_the_right_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RMSNORM, "comparisons", lambda *_: {"output": Close(0.01)})
    assert share(rates(NORM), "right") > 0.2


def test_an_answer_with_the_right_bits_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    same, never = OpMutant("same"), OpMutant("never", applies=lambda _: False)
    monkeypatch.setattr(RMSNORM, "mutants", (same, never))
    found = rates(NORM)
    for name in ("same", "never"):
        assert (found.wrong[name].runs, found.wrong[name].hidden) == (0, 1)


def held(actual: torch.Tensor, expected: torch.Tensor, roundings: torch.Tensor | None, kind: Quantised) -> Gate:
    return gate_of(actual, {"": expected} | ({} if roundings is None else {"roundings": roundings}), kind)


def test_a_slope_may_be_off_by_luck_and_not_by_more() -> None:
    """Errors of 5 % on 100 equal parts tilt a slope by 0.5 %; a factor of 1.04 is 8 times that."""
    expected = torch.full((1, 100), 1.0, dtype=torch.float64)
    error = torch.where(torch.arange(100) % 2 == 0, 0.05, -0.05)
    kind = Quantised(rms=0.2, slope=0.001)
    many, few = torch.tensor([1e6]), torch.tensor([100.0])
    tilted = expected * 1.015 + error
    assert not held(tilted, expected, many, kind).ok
    assert not held(tilted, expected, None, kind).ok
    assert held(tilted, expected, few, kind).ok
    assert not held(expected * 1.04 + error, expected, few, kind).ok
    assert not held(expected * 1.015, expected, few, kind).ok  # nothing else is off: no luck


def test_rows_of_a_matrix_are_averaged_where_their_errors_hang_together() -> None:
    """One row's rounding is thrice the others': luck of one number, not an error of the whole."""
    expected = torch.ones((1, 64, 8), dtype=torch.float64)
    baseline = expected + 1e-3
    actual = expected + 1e-3
    actual[0, 5] += 4e-3
    assert not gate_of(actual, {"": expected, "baseline": baseline}, Close()).ok
    assert gate_of(actual, {"": expected, "baseline": baseline}, replace(Close(), row_axes=2)).ok
    assert not gate_of(actual + 4e-3, {"": expected, "baseline": baseline}, replace(Close(), row_axes=2)).ok


@pytest.mark.slow
def test_seeds_are_put_together_by_op_type_and_a_definition_that_raises_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small.write(tmp_path, NORM.as_json())
    options = ["--op-type", "rmsnorm", "--seeds", "3", "--wrong-seeds", "2", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["", "--dataset", str(tmp_path), *options])
    assert main() == 0
    rates = Rates()
    for seed in range(3):
        rates.add(measure(NORM, seed, wrong=seed < 2))
    kept = json.loads((tmp_path / "out" / "rmsnorm.json").read_text())
    for kind, tallies in (("right", rates.right), ("wrong", rates.wrong)):
        assert {name: Tally(**tally) for name, tally in kept[kind].items()} == tallies
    assert "| rmsnorm | 1 | 3 (0 to 2) |" in capsys.readouterr().out
    with pytest.raises(KeyError, match="nonesuch"):
        measure(NORM.model_copy(update={"op_type": "nonesuch"}), 0)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_reference_of_the_same_form_is_given_to_a_definition_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ops.load("quantization", "nvfp4_quantize_k96")
    for name, columns in (("wide", 64), ("narrow", 32)):
        hole = ops.variant(own, K=columns, K_packed=columns // 2).as_json() | {"name": name, "reference": ""}
        (tmp_path / f"{name}.json").write_text(json.dumps(hole), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["", "--dataset", str(tmp_path), "--out", str(tmp_path / "filled")])
    references.main()
    assert capsys.readouterr().out == "2 written\n"
    filled = read_file(tmp_path / "filled" / "definitions" / "quantization" / "wide.json")
    assert filled.reference.rstrip() == own.reference.rstrip()
    assert not references.proved(filled, ops.load("quantization", "mxfp4_quantize_k96"))


SANITIZER = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
shift 4
"$@"
grep -q "eps" {kernel} && echo "========= ERROR SUMMARY: 0 errors" && exit 0
echo "========= Invalid __global__ write of size 2 bytes"
echo "========= ERROR SUMMARY: 1 error"
exit 42
"""


@pytest.mark.slow
@pytest.mark.parametrize(("text", "code"), [("eps = 1e-5", 0), ("", 1)])
def test_what_compute_sanitizer_finds_is_told(text: str, code: int, tmp_path: Path) -> None:
    kernel, program = tmp_path / "kernel.py", tmp_path / "compute-sanitizer"
    kernel.write_text(f"{text}\n\n\ndef run(hidden_states, weight):\n    return hidden_states\n", encoding="utf-8")
    program.write_text(SANITIZER.format(kernel=kernel), encoding="utf-8")
    program.chmod(0o755)
    script = Path(sanitize.__file__)
    command = [forked.interpreter(), str(script), str(kernel), "--definition", "rmsnorm_h96"]
    command += ["--dataset", str(ops.ROOT.parent), "--sanitizer", str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == code, ran.stderr
    assert f"6 calls, memcheck: ERROR SUMMARY: {code} error" in ran.stdout
    assert ("Invalid __global__ write" in ran.stdout) == bool(code)
