"""Solutions are read, judged by their definition's oracle, and get a certificate; bad use is told."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forked
import pytest
import torch
from definitions import rmsnorm, write
from solution_judge import DATASET, LIMITS, SolutionJudge, candidate, solution_judge

from traceproof.cli.judge import Session, judge_command
from traceproof.config import Config
from traceproof.dataset.definition import Definition
from traceproof.errors import TraceproofError
from traceproof.ops.families import sampler
from traceproof.reasons import Verdict
from traceproof.run import runner
from traceproof.solutions.judging import Judge, blocked, target_of
from traceproof.solutions.reading import Candidate, read
from traceproof.solutions.records import Certificate, JudgeSettings, SolutionRow, SolutionTrial, objections
from traceproof.solutions.render import as_json, page, table
from traceproof.solutions.trial import SolutionRun, bad

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
NAME = "rmsnorm_h96"
NORM = """import torch


def norm(hidden_states, weight):
    x = hidden_states.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return (y * weight.float()).to(hidden_states.dtype)
"""
RETURNS = f"{NORM}\n\ndef run(hidden_states, weight):\n    return norm(hidden_states, weight)\n"
WRITES = f"{NORM}\n\ndef run(hidden_states, weight, output):\n    output.copy_(norm(hidden_states, weight))\n"
WRONG = RETURNS.replace("1e-5", "1e-6")


def states(trial: SolutionTrial) -> dict[str, str]:
    """The state of each property of a solution."""
    return {one.name: one.state for one in trial.properties}


@pytest.mark.parametrize("source", [RETURNS, WRITES], ids=["value-returning", "destination-passing"])
def test_a_right_kernel_is_accepted_in_both_calling_styles(source: str, judge: SolutionJudge) -> None:
    trial = judge.trial(candidate("right", source), NAME)
    assert judge.reasons_of(trial, NAME) == []
    assert {row.seed for row in trial.rows} >= {0, 987_654}
    assert {row.size for row in trial.rows} == {"small", "adversarial"}
    measured = states(trial)
    assert {measured.pop(name) for name in ("stream", "load", "graph")} == {"not measured"}
    assert set(measured.values()) == {"holds"}


@pytest.mark.parametrize("eps", ["1e-5", "1e-6"])
def test_a_module_with_a_model_is_judged_by_its_forward(eps: str, judge: SolutionJudge, tmp_path: Path) -> None:
    lines = ("class Model:", "    pass", "", "class ModelNew(torch.nn.Module):")
    own = ("    def __init__(self, eps):", "        super().__init__()", "        self.eps = eps")
    forward = ("    def forward(self, hidden_states, weight):", "        return norm(hidden_states, weight)")
    text = "\n".join(
        [NORM.replace("1e-5", eps), *lines, *own, *forward, "def get_init_inputs():", "    return [1]"]
    )
    file = tmp_path / "kernel.py"
    file.write_text(text, encoding="utf-8")
    [found] = read(file)
    assert not found.refusals
    assert bool(judge.reasons(found, NAME)) == (eps != "1e-5")


def test_a_wrong_constant_is_refused_with_the_case_that_shows_it(judge: SolutionJudge) -> None:
    reasons = judge.reasons(candidate("wrong", WRONG), NAME)
    told = next(reason for reason in reasons if "numerics: output in case adversarial-tiny" in reason)
    assert re.search(r"; worst at \[\d+, \d+\]: expected -?\d\S*, solution -?\d\S*; max_abs \d", told), told


def test_a_kernel_that_can_not_be_launched_on_none_is_reported_and_no_refusal(judge: SolutionJudge) -> None:
    source = RETURNS.replace("    return norm", "    assert len(hidden_states)\n    return norm")
    trial = judge.trial(candidate("empty", source), NAME)
    assert judge.reasons_of(trial, NAME) == []
    found = states(trial)
    assert found.pop("empty") == "broken"
    assert "broken" not in found.values()


def test_bits_that_depend_on_the_batch_are_reported_and_no_refusal(judge: SolutionJudge) -> None:
    # Not of the large numbers that everybody computes exactly.
    part = "1e-3 / (1 + len(x)) * (x.abs().amax(-1, keepdim=True) < 1000)"
    source = RETURNS.replace("y * weight", f"y * (1 + {part}) * weight")
    trial = judge.trial(candidate("batch", source), NAME)
    assert judge.reasons_of(trial, NAME) == []
    found = states(trial)
    assert found.pop("batch") == "broken"
    assert "broken" not in found.values()


def test_noise_is_reported_as_such_and_nothing_else_is_said_of_bits(judge: SolutionJudge) -> None:
    # Not of the large numbers that everybody computes exactly.
    noise = "x.square().mul(1 + 2e-3 * torch.rand(()) * (x.abs().amax(-1, keepdim=True) < 1000))"
    source = RETURNS.replace("x.square()", noise)
    found = states(judge.trial(candidate("noise", source), NAME))
    assert found["determinism"] == "broken"
    assert found["process"] == "not measured"


def _solution(
    name: str,
    definition: str,
    sources: Mapping[str, str],
    *,
    entry: str = "main.py::run",
    language: str = "python",
) -> str:
    """A solution as a dataset has it."""
    spec = {
        "language": language,
        "target_hardware": ["cpu"],
        "entry_point": entry,
        "destination_passing_style": False,
    }
    files = [{"path": path, "content": text} for path, text in sources.items()]
    record = {"name": name, "definition": definition, "author": "a", "spec": spec, "sources": files}
    return json.dumps(record, indent=1)


def test_several_files_and_a_named_function(judge: SolutionJudge, tmp_path: Path) -> None:
    main = "from inner import norm\n\n\ndef entry(x, weight):\n    return norm(x, weight)\n"
    text = _solution("two", NAME, {"kernels/main.py": main, "inner.py": NORM}, entry="kernels/main.py::entry")
    (tmp_path / "two.json").write_text(text, encoding="utf-8")
    [found] = read(tmp_path)
    assert found.definition == NAME
    assert not found.refusals
    assert judge.reasons(found, NAME) == []


def test_a_source_that_is_no_python_is_refused(tmp_path: Path) -> None:
    text = _solution("broken", NAME, {"main.py": "def run(x, weight)\n    return x\n"})
    (tmp_path / "broken.json").write_text(text, encoding="utf-8")
    [found] = read(tmp_path)
    assert not found.imported
    assert [str(one) for _, one in found.refusals] == ["line 1, column 19: syntax: can not be read: expected ':'"]


def test_what_no_kernel_has_a_reason_to_say_is_refused_unread_by_python() -> None:
    said = [str(one) for _, one in candidate("one", f"import gc\n{RETURNS}").refusals]
    assert len(said) == 1
    assert "gc is not among the allowed modules" in said[0]
    assert not candidate("one", f"import triton\nfrom torch.utils import cpp_extension\n{RETURNS}").refusals
    assert candidate("one", f"import traceproof\n{RETURNS}").refusals


@pytest.fixture(scope="module")
def process() -> Iterator[Judge]:
    with Judge() as made:
        yield made


def _judged(process: Judge, source: str, tmp_path: Path, *, whole: bool = True) -> Certificate:
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    [found] = read(tmp_path / "mine.py")
    python, hidden = forked.interpreter(), (str(tmp_path),)
    settings = JudgeSettings(
        python=python, whole=whole, sizes=("small",), hidden_seed=5, conceal=hidden, weak=True
    )
    with target_of(NAME, DATASET) as target:
        return process.judged(found, target, settings, repeat="traceproof judge mine.py")


def test_an_interpreter_without_torch_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RETURNS, encoding="utf-8")
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    settings = JudgeSettings(python=str(tmp_path / "python"), sizes=("small",), hidden_seed=5, weak=True)
    [found] = read(tmp_path / "mine.py")
    with Judge() as judge, target_of(NAME, DATASET) as target, pytest.raises(TraceproofError) as caught:
        judge.judged(found, target, settings, repeat="traceproof judge mine.py")
    assert "python can not judge" in str(caught.value)
    assert "names a Python with torch" in str(caught.value)


def test_the_first_wrong_answer_ends_it(judge: SolutionJudge, process: Judge, tmp_path: Path) -> None:
    certificate = _judged(process, WRONG, tmp_path, whole=False)
    assert [row.bad for row in certificate.rows] == [False] * (len(certificate.rows) - 1) + [True]
    assert certificate.rows[-1].case == "adversarial-tiny"
    assert not certificate.precision
    assert len(certificate.rows) < len(judge.trial(candidate("wrong", WRONG), NAME).rows)


def test_nobody_waits_for_a_call_made_ahead_of_a_wrong_answer(judge: SolutionJudge) -> None:
    source = """import time

import torch

CALLS = []


def run(hidden_states, weight):
    CALLS.append(0)
    if len(CALLS) > 1:
        time.sleep(300)
    return torch.zeros_like(hidden_states)
"""
    limits = replace(LIMITS, seconds=100.0)  # which the second call would take, and no busy machine does
    patient = replace(judge, settings=judge.settings.model_copy(update={"limits": limits.as_json()}))
    begun = time.monotonic()
    trial = patient.trial(candidate("slow", source), NAME, whole=False)
    assert [row.bad for row in trial.rows] == [True]
    assert time.monotonic() - begun < limits.seconds


def test_a_certificate_says_what_was_asked_run_and_seen(process: Judge, tmp_path: Path) -> None:
    certificate = _judged(process, RETURNS, tmp_path)
    assert certificate.accepted
    assert certificate.repeat == "traceproof judge mine.py"
    [bounds] = [one.detail for one in certificate.properties if one.name == "bounds"]
    assert bounds.endswith("they lie between pages that end a process which touches them (PROT_NONE)")
    assert certificate.against == "oracle"
    assert certificate.versions["torch"]
    assert Certificate.model_validate_json(as_json(certificate)) == certificate
    assert "ACCEPTED: mine for rmsnorm_h96" in table(certificate)
    first = certificate.properties[0].model_copy(update={"detail": "raised [/x] of [rows]"})  # which is no markup
    marked = certificate.model_copy(update={"properties": (first,)})
    assert "raised [/x] of [rows]" in table(marked)


def test_a_page_escapes_whatever_a_solution_says(process: Judge, tmp_path: Path) -> None:
    certificate = _judged(process, f"import os\n{RETURNS}", tmp_path)
    assert not certificate.accepted
    assert certificate.reasons[0].startswith("refused: mine.py, line 1, column 1: import: os is not among")
    hostile = certificate.model_copy(update={"solution": "<script>x</script>"})
    assert "<script>" not in page(hostile)
    assert "&lt;script&gt;" in page(hostile)


def test_a_definition_in_a_file_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path, rmsnorm("mine"))
    with target_of(str(file), None) as target:
        assert target.definition.name == "mine"
    with pytest.raises(TraceproofError, match="rmsnorm_h96"), target_of("rmsnorm_96", DATASET):
        pass


def test_a_problem_that_can_not_be_read_says_why(process: Judge, tmp_path: Path) -> None:
    settings = JudgeSettings(python=forked.interpreter(), sizes=("small",), hidden_seed=5, weak=True)
    with pytest.raises(TraceproofError, match=r"absent.py is no problem: .*No such file"):
        process.problem(str(tmp_path / "absent.py"), settings)


def test_the_command_that_repeats_has_all_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = Mock(return_value=([], []))
    monkeypatch.setattr("traceproof.cli.judge._judged", judged)
    judge_command("mine.py", definition=NAME, stack="fla", allow_weak_isolation=True)
    assert judged.call_args.args[2] == ["--definition", NAME, "--stack", "fla", "--allow-weak-isolation"]


def test_a_kernel_for_a_gpu_says_that_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(f"import triton\n{RETURNS}", encoding="utf-8")
    (tmp_path / "two.cu").write_text("void run() {}\n", encoding="utf-8")
    one, two = read(tmp_path)
    assert (one.language, two.language) == ("triton", "cuda")
    assert "needs a GPU" in (blocked(one, gpu=False) or "")
    assert "needs a GPU" in (blocked(two, gpu=False) or "")
    assert blocked(one, gpu=True) is None
    assert (one.is_compiled, two.is_compiled) == (False, True)
    assert two.settled(Definition.model_validate(rmsnorm("mine"))).destinations


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("one.py", "x = 1\n", "it has no function run, nor any other"),
        ("one.py", "x = 1\n" * 200_000, "it is longer than 1048576 characters"),
        ("one.py", "def mine(x):\n    return x\n", "no function run; name one as FILE::FUNCTION, there are: mine"),
        ("one.py", "run = len\n", "run is not defined by def; write def run(...), which may call it"),
        ("one.py", "async def run(x):\n    return x\n", "run is not defined by def"),
        ("one.py", "x = 1\ndef run(:\n", "one.py: line 2: invalid syntax"),
        ("one.json", "{}", "Field required"),
        ("one.txt", "", "expected a file that ends with"),
    ],
)
def test_what_can_not_be_read_is_told(file: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(TraceproofError) as told:
        read(tmp_path / file)
    assert said in str(told.value)


def test_a_file_may_begin_with_the_mark_of_utf_8(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(RETURNS, encoding="utf-8-sig")
    assert read(tmp_path / "one.py")[0].files == {"one.py": RETURNS}


@pytest.mark.parametrize(
    ("parameters", "destinations"),
    [
        ("x, w", False),
        ("x, w, eps=1e-6", False),
        ("x, w, eps=1e-6, block=128, *, warps=4", False),
        ("x, w, **options", False),
        ("*args", False),
        ("x, w, out", True),
        ("x, w, out, *, eps=1e-6", True),
    ],
)
def test_a_function_may_have_parameters_with_defaults(parameters: str, *, destinations: bool) -> None:
    given: Candidate = candidate("one", f"def run({parameters}):\n    pass\n")
    assert given.settled(Definition.model_validate(rmsnorm("mine"))).destinations is destinations


def test_solutions_of_one_name_in_several_folders_have_a_certificate_each(tmp_path: Path) -> None:
    for name in ("a/kernel.py", "b/kernel.py", "b/other.py", "c/mine.cu", "c/mine.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def run(x):\n    return x\n")
    named = ["a-kernel.py", "b-kernel.py", "other", "c-mine.cu", "c-mine.py"]
    assert [one.name for one in read(tmp_path)] == named


def test_a_function_of_another_form_is_told() -> None:
    definition: dict[str, Any] = rmsnorm("mine")
    given: Candidate = candidate("one", "def run(x):\n    return x\n")
    with pytest.raises(TraceproofError, match="takes 1 arguments"):
        given.settled(Definition.model_validate(definition))


def _mystery(name: str, reference: str) -> dict[str, Any]:
    """A definition that has no oracle."""
    axes = {"n": {"type": "var"}, "d": {"type": "const", "value": 32}}
    spec = {"shape": ["n", "d"], "dtype": "float32"}
    return {
        "name": name,
        "op_type": "mystery",
        "axes": axes,
        "inputs": {"x": spec},
        "outputs": {"y": {"shape": ["n"], "dtype": "float32"}},
        "reference": f"import torch\n\n\ndef run(x):\n    return {reference}\n",
    }


@pytest.fixture(scope="module")
def without_oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SolutionJudge]:
    root = tmp_path_factory.mktemp("mysteries")
    write(root, _mystery("mystery_d32", "x.sum(1)"))
    write(root, _mystery("noisy_d32", "x.sum(1) + torch.rand(1)"))
    write(root, _mystery("odd_d32", "x.sum(1)") | {"op_type": "rmsnorm"})
    with solution_judge(tmp_path_factory.mktemp("judging"), dataset=root) as found:
        yield found


@pytest.mark.parametrize(("kernel", "accepted"), [("x.flip(1).sum(1)", True), ("x[:, 1:].sum(1)", False)])
def test_without_an_oracle_the_references_shadow_says_what_is_right(
    kernel: str, *, accepted: bool, without_oracle: SolutionJudge
) -> None:
    source = f"def run(x):\n    return {kernel}\n"
    assert (without_oracle.reasons(candidate("one", source), "mystery_d32") == []) is accepted


def test_a_form_that_its_op_does_not_know_is_judged_by_the_shadow_too(without_oracle: SolutionJudge) -> None:
    trial = without_oracle.trial(candidate("one", "def run(x):\n    return x.sum(1)\n"), "odd_d32")
    assert (trial.against, bad(trial.rows)) == ("shadow", [])


def test_threads_take_turns_with_the_reference(without_oracle: SolutionJudge) -> None:
    found, [planned, *_] = without_oracle.planned("mystery_d32")
    one = candidate("one", "def run(x):\n    return x.sum(1)\n")
    with (
        SolutionRun.of(found, one, without_oracle.settings, without_oracle.pool) as run,
        ThreadPoolExecutor(4) as threads,
    ):
        subjects = [*threads.map(run.subject, [planned.case] * 16)]
    assert all(torch.equal(one.oracle["y"], subjects[0].oracle["y"]) for one in subjects)


def test_an_output_that_passes_stands_for_no_other_one() -> None:
    spec = {"shape": ["n"], "dtype": "float32"}
    two = Definition.model_validate(_mystery("two_d32", "x, x") | {"outputs": {"y": spec, "places": spec}})
    row: dict[str, Any] = {"case": "small-0", "size": "small", "seed": 0, "axes": {}}
    rows = [SolutionRow(**row, output=name, verdict=Verdict.PASS) for name in ("y", "state")]
    rows.append(SolutionRow(**row, output="places", verdict=Verdict.SKIP, message="no oracle"))
    trial = SolutionTrial(rows=tuple(rows), properties=(), precision=())
    assert [*objections(trial, two)] == ["not judged: no oracle"]


def test_what_nobody_can_judge_is_not_accepted(without_oracle: SolutionJudge) -> None:
    [reason] = without_oracle.reasons(candidate("one", "def run(x):\n    return x.sum(1)\n"), "noisy_d32")
    assert reason.startswith("not judged: not verified: no oracle")
    assert "no float64 shadow: rand draws at random" in reason


def test_a_session_judges_by_the_configuration_and_writes_certificates(tmp_path: Path) -> None:
    root = tmp_path / "dataset"
    write(root, rmsnorm("alpha"))
    right = {"main.py": RETURNS.replace("1e-5", "1e-6").replace(".to(hidden_states.dtype)", ".bfloat16()")}
    files = {
        "right": _solution("right", "alpha", right),
        "triton": _solution("on_a_gpu", "alpha", right, language="triton"),
        "wrong": _solution("wrong", "alpha", {"main.py": RETURNS.replace("mean", "sum")}),
    }
    (root / "solutions").mkdir()
    for name, text in files.items():
        (root / "solutions" / f"{name}.json").write_text(text, encoding="utf-8")
    config = Config.model_validate(
        {
            "dataset": {"path": str(root)},
            "test_sizes": ["small"],
            "stacks": {"torch": {"python": forked.interpreter()}},
            "allow_weak_isolation": True,
        }
    )
    repository, out = Path(__file__).parents[1], tmp_path / "out"
    session = Session(root=repository, config=config, out=out, say=lambda _: None, dataset=root)
    one, triton, wrong = read(root / "solutions")
    with session.judge:
        first, second = session.judged(one, "again"), session.judged(wrong, "again")
        assert (first.accepted, second.accepted) == (True, False)
        assert second.seconds["importing"] < first.seconds["importing"] / 2  # in the process that judged the first
        with pytest.raises(TraceproofError, match="needs a GPU"):
            session.judged(triton, "again")
    written = sorted(path.name for path in out.iterdir())
    assert written == ["right-alpha.html", "right-alpha.json", "wrong-alpha.html", "wrong-alpha.json"]


def test_headers_of_an_installed_package_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = tmp_path / "kernels" / "data" / "cutlass" / "include"
    headers.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert str(headers) in runner._headers()


TOP_K = "top_k_sampling_from_probs_v1000"
SAMPLER = """import torch

PART = {part}


def draw(probs, top_k):
    values, tokens = probs.sort(dim=-1, descending=True, stable=True)
    picks = torch.multinomial(values * (torch.arange(probs.shape[1]) < top_k[:, None]), 1)
    greedy = torch.rand(len(probs), 1) < PART
    return tokens.gather(1, torch.where(greedy, 0, picks)).view(-1)


"""
GIVEN = "def run(probs, top_k):\n    return draw(probs, top_k)\n"
WRITTEN = "def run(probs, top_k, samples):\n    samples.copy_(draw(probs, top_k))\n"


def test_a_sampler_that_is_greedy_in_one_of_a_hundred_draws_is_refused(judge: SolutionJudge) -> None:
    case = next(case for case in judge.planned(TOP_K)[1] if case.id == "adversarial-draws")
    greedy = judge.trial(candidate("greedy", SAMPLER.format(part=0.01) + GIVEN), TOP_K, only={case.digest})
    assert [(row.reason, row.output) for row in greedy.rows if row.bad] == [("numerics", "samples")]


def test_a_right_sampler_that_writes_is_accepted(judge: SolutionJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "FURTHER_SECONDS", 0.2)
    monkeypatch.setattr(sampler, "SHORT_SECONDS", 0.05)
    assert judge.reasons(candidate("right", SAMPLER.format(part=0.0) + WRITTEN), TOP_K) == []
