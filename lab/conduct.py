"""Wrong conduct around right references: caches by address, answers that turn wrong, outputs that change later.

    PYTHONPATH=src:lab python lab/conduct.py --dataset tests/dataset --seed 1 --sample 100

Each is a few lines of text around a definition's own reference, made for all of its inputs and outputs, and judged
in isolated workers: as a reference on the cases of `verify`, and as a solution on those of `judge`. The policy is
not asked, which refuses many of them unread. docs/measurements.md has the figures. Exit code 1: a wrong one
passes, or a right one of `--texts` is refused.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest.mock import patch

import yaml

from calibrate import DATASET, chosen, command_line, side_by_side
from known_bugs import settings
from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.ops import registry
from traceproof.reasons import Verdict
from traceproof.run.engine import Engine
from traceproof.run.plan import PlanSelection, planned_alone
from traceproof.run.schema import REFERENCE
from traceproof.run.workers import EngineSettings, untrusted_pool
from traceproof.sandbox import GIB, Limits, policy
from traceproof.solutions.reading import Candidate
from traceproof.solutions.records import objections
from traceproof.solutions.trial import SolutionRun, planned, tried

AT_ONCE = 4  # that a process judges in a row
ADDRESS, CONDUCT = KINDS = ("caches by address", "conduct")
UNUSUAL, RIGHT = "unusual", "right in an unusual style"  # of `--texts`
# What comes before and after the reference's own call, whose arguments are `given` and whose outputs `found`.
WRAPPED = """

right = run
CALLS, HELD = [], {{}}


def tensors(values):
    values = list(values.values()) if isinstance(values, dict) else values
    return [one for one in (values if isinstance(values, (list, tuple)) else [values]) if torch.is_tensor(one)]


def spoilt(value):
    if value.numel():
        flat = value.view(-1)
        flat[len(flat) // 2 :] = flat[: len(flat) - len(flat) // 2].clone()
        flat[:1] = 3


def run(*given):
    given = list(given)
    CALLS.append(1)
{before}
    found = right(*given)
{after}
    return found
"""
KEPT = """value = given[{place}]
if torch.is_tensor(value):
    given[{place}] = HELD.setdefault({key}, value.clone())"""
ALL_KEPT = """key = tuple((value.data_ptr(), value.shape) for value in tensors(given))
if key in HELD:
    return HELD[key]() if callable(HELD[key]) else HELD[key]"""
COPIES = """import copy
answer = copy.deepcopy(found)
HELD[key] = lambda: copy.deepcopy(answer)"""


SPOIL = "[spoilt(one) for one in tensors(found)]"
# By name, lines before and after the call; a count of calls, an input's place and a method are put in.
CONDUCTS = {
    "wrong from call {count} on": ("", f"if len(CALLS) >= {{count}}:\n    {SPOIL}"),
    "right from call {count} on": ("", f"if len(CALLS) < {{count}}:\n    {SPOIL}"),
    "outputs in a ring of two": (
        "",
        """for place, value in enumerate(tensors(found)):
    ring = HELD.setdefault((place, value.shape), [torch.empty_like(value) for _ in range(2)])
    value.set_(ring[len(CALLS) % 2].copy_(value))""",
    ),
    "earlier outputs change in the next call": (
        "",
        "for value in HELD.get(0, []):\n    spoilt(value)\nHELD[0] = tensors(found)",
    ),
    "outputs change after the return": (
        "",
        "import threading\nthreading.Timer(0.02, lambda: [spoilt(one) for one in tensors(found)]).start()",
    ),
    "a finaliser changes outputs of the call before": (
        "HELD.pop('owner', None)",
        """import weakref
kept = [value.detach() for value in tensors(found)]
HELD["owner"] = type("Owner", (), {})()
weakref.finalize(HELD["owner"], lambda: [spoilt(value) for value in kept])""",
    ),
    "the next call's start changes outputs": (
        "for value in HELD.get(0, []):\n    spoilt(value)",
        "HELD[0] = [value.detach() for value in tensors(found)]",
    ),
    "an input's data replaced": (
        "value = given[{place}]\nif torch.is_tensor(value):\n    value.data = torch.zeros_like(value)",
        "",
    ),
    "an input written to": (
        "",
        "value = given[{place}]\nif torch.is_tensor(value) and value.numel():\n    value.view(-1)[-1:] = 1",
    ),
    "Tensor.{method} patched": (
        "",
        """if len(CALLS) == 2:
    HELD["was"] = torch.Tensor.{method}
    torch.Tensor.{method} = lambda *a, **k: HELD["was"](*a, **k)
if len(CALLS) > 1:
    """
        + SPOIL,
    ),
}


@dataclass(frozen=True, slots=True)
class Wrong:
    """A definition's reference with lines before and after its call."""

    definition: str
    kind: str
    name: str
    text: str


def around(definition: Definition, kind: str, name: str, before: str = "", after: str = "") -> Wrong:
    """A definition's reference with these lines."""
    parts = {"before": before or "pass", "after": after or "pass"}
    lines = {part: "\n".join(f"    {line}" for line in text.splitlines()) for part, text in parts.items()}
    return Wrong(definition.name, kind, name, definition.reference + WRAPPED.format(**lines))


def wrong(definition: Definition, random: Random) -> Iterator[Wrong]:
    """All of a definition."""
    unread = registry.get(definition.op_type).of_form(definition).unread(definition)
    tensors = [name for name, spec in definition.inputs.items() if spec.shape is not None and name not in unread]
    for name in tensors:
        place = list(definition.inputs).index(name)
        for told, key in (
            ("address", "value.data_ptr()"),
            ("address and shape", "(value.data_ptr(), value.shape)"),
        ):
            yield around(definition, ADDRESS, f"{name} by its {told}", KEPT.format(place=place, key=key))
    yield around(definition, ADDRESS, "the answer by all addresses", ALL_KEPT, COPIES)
    count, place = random.choice((3, 5, 20, 30)), list(definition.inputs).index(random.choice(tensors))
    method = random.choice(("contiguous", "to", "float", "clone", "as_subclass", "data_ptr"))
    for name, (before, after) in CONDUCTS.items():
        marks = {"{count}": str(count), "{place}": str(place), "{method}": method}
        texts = [name, before, after]
        for mark, value in marks.items():
            texts = [text.replace(mark, value) for text in texts]
        yield around(definition, CONDUCT, *texts)


def from_texts(path: Path, dataset: Path) -> Iterator[Wrong]:
    """Those of a file such as `lab/unusual.yaml`, the right ones among them."""
    known = read_tree(dataset).definitions
    for kind, by_definition in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        for name, entries in by_definition.items():
            for told, change in entries.items():
                text = change if isinstance(change, str) else known[name].definition.reference
                for old, new in zip(change[::2], change[1::2], strict=True) if text is not change else ():
                    assert old in text, f"{name} has no {old!r}"
                    text = text.replace(old, new)
                yield Wrong(name, UNUSUAL if kind == "wrong" else RIGHT, told, text)


def as_reference(one: Wrong, dataset: Path, engine: Engine, seed: int) -> str:
    """What refuses it as a definition's reference; empty: nothing does."""
    definition = read_tree(dataset).definitions[one.definition].definition
    definition = definition.model_copy(update={"reference": one.text})
    entry = planned_alone(definition, PlanSelection(sizes=("small",), hidden_seed=seed))
    rows = engine.rows(entry, [REFERENCE])
    bad = (row for row in rows if row.verdict in {Verdict.FAIL, Verdict.ERROR})
    return next((f"{row.case} {row.output} {row.reason}" for row in bad), "")


def as_kernel(one: Wrong, dataset: Path, engine: Engine, seed: int) -> str:
    """What refuses it as a solution; empty: nothing does."""
    given = settings(dataset, seed)
    definition, cases = planned(one.definition, given)
    candidate = Candidate(name="wrong", path="main.py", destinations=False, files={"main.py": one.text})
    with SolutionRun.of(definition, candidate, given, engine.untrusted) as run:
        trial = tried(run, cases, whole=False)
    return next(iter(objections(trial, definition)), "")[:90]


def main() -> int:
    """Print a table, and what passes."""
    parser = command_line(__doc__)
    parser.add_argument("--seed", type=int, help="drawn unless given")
    parser.add_argument("--sample", type=int, default=100, help="of each kind")
    parser.add_argument("--as", dest="roles", nargs="+", default=["reference", "kernel"])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after these")
    parser.add_argument("--texts", type=Path, help="those of a file, e.g. lab/unusual.yaml, in their place")
    options = parser.parse_args()
    dataset = (options.dataset or [DATASET])[0]
    options.seed = secrets.randbelow(1 << 20) if options.seed is None else options.seed
    sys.stdout.write(f"seed {options.seed}\n")
    random = Random(options.seed)  # noqa: S311 - a sample
    made = [one for definition in chosen(options) for one in wrong(definition, random)]
    taken: list[Wrong] = []
    for kind in KINDS:
        mine = [one for one in made if one.kind == kind]
        taken += random.sample(mine, min(options.sample, len(mine)))
    taken = [*from_texts(options.texts, dataset)] if options.texts else taken
    random.shuffle(taken)  # so that an early end leaves a sample of both
    counts: dict[tuple[str, str], list[str]] = defaultdict(list)
    given = options.roles, dataset, options.seed, time.time() + options.seconds
    calls = {start: (taken[start : start + AT_ONCE], *given) for start in range(0, len(taken), AT_ONCE)}
    for _, found, error in side_by_side(judged, calls, options.jobs):
        if error is not None:
            raise error
        for kind, role, passed in found:
            counts[kind, role].append(passed)
    sys.stdout.write("\n".join(table(counts)) + "\n")
    wrongly = (one if kind != RIGHT else not one for (kind, _), passed in counts.items() for one in passed)
    return int(any(wrongly))


def judged(
    part: list[Wrong], roles: list[str], dataset: Path, seed: int, end: float
) -> list[tuple[str, str, str]]:
    """Of some of them, in each role: kind, role, and what it is where it passes."""
    found = []
    limits = Limits(seconds=60.0, setup_seconds=60.0, memory_bytes=8 * GIB)
    with (
        patch.object(policy, "check", lambda *_: []),
        Engine(EngineSettings(limits=limits, weak=True), untrusted_pool(weak=True)) as engine,
    ):
        for one in part:
            for role in roles if time.time() < end else ():
                seen = (as_reference if role == "reference" else as_kernel)(one, dataset, engine, seed)
                found.append((one.kind, role, "" if seen else f"{one.definition}: {one.name}"))
                sys.stderr.write(f"{one.definition} as {role}: {one.name}: {seen or 'PASSES'}\n")
    return found


def table(counts: dict[tuple[str, str], list[str]]) -> Iterator[str]:
    """Counts per kind and role, and what passes, as Markdown."""
    yield "| kind | judged as | made | refused |\n|---|---|---:|---:|"
    for (kind, role), passed in sorted(counts.items()):
        yield f"| {kind} | {role} | {len(passed)} | {passed.count('')} |"
    for (kind, role), passed in sorted(counts.items()):
        yield from (f"- {kind}, as {role}: {one}" for one in passed if one)


if __name__ == "__main__":
    sys.exit(main())
