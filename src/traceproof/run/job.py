"""The job `verify` of one op_type, or of a group of its definitions: plan and cache in, verdict file out.

What the cache has is not computed again, and where it has everything, torch is not even imported. The engine
computes the rest; rows are kept as soon as a definition is done. Last come the command that repeats each row, and
replay bundles of failing cases.
"""

import math
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceproof.dataset.definition import FUNCTION
from traceproof.digests import digest_file, digest_json
from traceproof.files import write_json, write_text
from traceproof.names import OP_TYPE, path_part
from traceproof.programs import telling
from traceproof.reasons import Error, Grade, Verdict
from traceproof.run.cache import Cache, key_of_file
from traceproof.run.schema import (
    PAIR,
    REFERENCE,
    SHADOW,
    WHOLE,
    OpTypePlan,
    PlannedDefinition,
    VerdictRow,
    environment_of,
    rows_text,
)
from traceproof.run.workers import EngineSettings
from traceproof.stacks import MAIN, TRUTHS

if TYPE_CHECKING:  # it imports torch
    from traceproof.run.engine import Engine

Rows = list[VerdictRow]
# Errors that the same code and inputs would meet again. Others (too slow, too much memory, killed) may be the
# machine's fault.
LASTING = frozenset({Error.EXCEPTION, Error.REFUSED})


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job `verify`."""

    plan: OpTypePlan  # the definitions of this job
    group: str = ""  # suffix of this job's verdict file among the op_type's jobs; empty: its only job
    implementations: Sequence[str]
    settings: EngineSettings
    # makes the engine, called only if something has to be computed
    engine: Callable[[EngineSettings], AbstractContextManager["Engine"]]
    cache: Path | None = None  # None, or a user's tolerance: nothing is kept
    options: str = ""  # further command-line options for commands that repeat a case
    force: bool = False  # compute also what is kept
    parallel: int = 1  # definitions computed at the same time

    def verify(self, verdicts: Path) -> None:
        """Write the verdict file by one rename. Raises TraceproofError: the disk is full; the cache has rows."""
        with ExitStack() as stack:
            uses_cache = self.cache is not None and self.settings.tolerance is None
            cache = stack.enter_context(Cache(self.cache)) if self.cache is not None and uses_cache else None
            requests = {name: _Asked(entry, self) for name, entry in self.plan.definitions.items()}
            if cache is not None and not self.force:
                kept_rows = cache.get(key for request in requests.values() for key in request.keys.values())
                for request in requests.values():
                    request.take(kept_rows)
            self._compute([request for request in requests.values() if request.lacking], cache)
        run = verdicts.parent.parent.absolute()
        bundles = run / REPLAY / path_part(self.plan.op_type, OP_TYPE)  # an earlier run's bundles of this job
        for name in self.plan.whole if self.group else [""]:
            shutil.rmtree(bundles / path_part(name) if name else bundles, ignore_errors=True)
        of: dict[str, Any] = {"case": None, "implementation": REFERENCE, "against": None, "output": WHOLE}
        of |= {"op_type": self.plan.op_type, "verdict": Verdict.ERROR, "reason": Error.DEFINITION}
        files = ((Path(one.path).stem, one) for one in self.plan.broken)
        broken = (VerdictRow(definition=name, path=one.path, message=one.message, **of) for name, one in files)
        lines = [rows_text(row.as_json() for row in broken)]
        for request in requests.values():
            entry, rows = request.entry, request.rows()
            rows = finished(rows if entry.beside else graded(rows), entry, options=self.options, run=run)
            lines.append(rows_text(row.as_json() for row in rows))
        write_text(verdicts, "".join(lines))
        if self.cache is not None:
            with Cache(self.cache) as cache:
                cache.put({key_of_file(verdicts, self.cache): digest_file(verdicts)})

    def _compute(self, missing: Sequence["_Asked"], cache: Cache | None) -> None:
        """Let the engine compute what is missing; where definitions run in parallel, the longest first."""
        if not missing:
            return
        calls = _Calls(f"{self.plan.op_type + self.group:24}", sum(request.calls for request in missing))
        with self.engine(replace(self.settings, progress=calls.count)) as engine:
            # before there is a second thread, which would keep it from forking
            engine.prepare([request.entry for request in missing], self.implementations)

            def compute(request: _Asked) -> None:
                new_rows = request.compute(engine)
                if cache is not None:
                    cache.put(new_rows)

            threads = ThreadPoolExecutor(self.parallel)
            ordered = sorted(missing, key=lambda request: -request.cost) if self.parallel > 1 else missing
            try:
                with telling(calls):
                    for done in [threads.submit(compute, request) for request in ordered]:
                        done.result()
            except BaseException as error:  # an interrupt waits for no thread
                threads.shutdown(wait=not isinstance(error, KeyboardInterrupt), cancel_futures=True)
                raise
            threads.shutdown()
        sys.stderr.write(f"{calls}\n")


class _Asked:
    """One definition: keys of its rows, the rows that are known, and the implementations whose rows are missing.

    Rows of one implementation depend on it alone, unless one fails by its numbers: such rows say who agrees with
    whom, so the definition's rows are computed together. So are pairs of ground truths.
    """

    def __init__(self, entry: PlannedDefinition, job: Job) -> None:
        """At first, all rows are missing."""
        self.entry = entry
        self.keys = {name: _key(entry, name, job) for name in sorted(job.implementations)}  # of rows
        self.keys[PAIR] = digest_json([key for name, key in self.keys.items() if name in TRUTHS])  # pairs: last
        self.all = digest_json(self.keys)
        self.found: dict[str, Rows] = {}  # by implementation, and PAIR
        self.lacking = {*self.keys}
        if all(case.skip is not None for case in entry.cases):  # the plan skips all: nothing is started
            for name in self.lacking:
                record = job.settings.record(name)
                self.found[name] = [] if name == PAIR else entry.known_rows(name, record, job.settings.code)
            self.lacking.clear()
        # Rough cost: a sampler's reference often works row by row.
        self.cost = sum((1 + case.trials) * max(1, math.prod(case.case.axes.values())) for case in entry.cases)

    @property
    def calls(self) -> int:
        """Number of (case, implementation) calls that are missing."""
        shown = sum(not case.hidden for case in self.entry.cases)
        return sum(len(self.entry.cases) if name == REFERENCE else shown for name in self.lacking - {PAIR})

    def take(self, kept: Mapping[str, Any]) -> None:
        """Take the rows that the cache has, by key."""
        together = False  # whether some rows depend on other implementations' rows
        for name, key in self.keys.items():
            if key in kept and kept[key]["all"] in {"", self.all}:
                self.found[name] = [VerdictRow.model_validate(row) for row in kept[key]["rows"]]
                self.lacking.discard(name)
                together |= bool(kept[key]["all"])
            else:
                together |= key in kept
        if self.lacking == {PAIR} and self._passed < 2:  # there are no two ground truths to compare
            self.found[PAIR] = []
            self.lacking.clear()
        if self.lacking and together:
            self.lacking = {*self.keys}
        elif PAIR in self.lacking:  # pairs need both outputs, which are not kept
            self.lacking |= {name for name in self.keys if name in TRUTHS}

    @property
    def _passed(self) -> int:
        """Number of ground truths with rows that passed."""
        truths = (rows for name, rows in self.found.items() if name in TRUTHS)
        return sum(any(row.verdict is Verdict.PASS for row in rows) for rows in truths)

    def compute(self, engine: "Engine") -> dict[str, Any]:
        """Compute the missing rows, and all rows where one of them is disputed; returns what to keep, by key.

        Once more if a process died, which something outside may have killed; not if a case timed out.
        """
        rows: Rows = []
        for _ in range(2):
            names = sorted(self.lacking - {PAIR})
            rows = engine.rows(self.entry, names)
            reasons = {row.reason for row in rows}
            if Error.CRASH in reasons and Error.TIMEOUT not in reasons:
                rows = engine.rows(self.entry, names)
            if not any(row.disputed for row in rows) or len(self.lacking) == len(self.keys):
                break
            self.lacking = {*self.keys}
        kept: dict[str, Any] = {}
        of = [(PAIR if PAIR in row.implementation else row.implementation, row) for row in rows]
        self.found |= {name: [row for whose, row in of if whose == name] for name in self.lacking}
        for name in self.lacking:
            mine = self.found[name]
            lasting = all(row.verdict is not Verdict.ERROR or row.reason in LASTING for row in mine)
            if lasting and (name != PAIR or self._passed > 1):
                together = self.all if any(row.disputed for row in mine) else ""
                kept[self.keys[name]] = {"all": together, "rows": [row.as_json() for row in mine]}
        return kept

    def rows(self) -> Rows:
        """All rows, by implementation, pairs last; each has the key under which it is kept as digests.outputs."""
        return [
            row.changed(digests=row.digests.model_copy(update={"outputs": key}))
            for name, key in self.keys.items()
            for row in self.found[name]
        ]


def _key(entry: PlannedDefinition, name: str, job: Job) -> str:
    """Cache key of one implementation's rows: a digest of all that they depend on."""
    is_reference, settings = name == REFERENCE, job.settings  # which alone has nonces and hidden cases
    environment = settings.environments.get(environment_of(name))
    records = [settings.environments[MAIN].record["digest"], environment and environment.record["digest"]]
    cases = [
        [case.digest, case.skip and asdict(case.skip), case.repeat, case.nonce if is_reference else 0, case.blobs]
        for case in entry.cases
        if is_reference or not case.hidden
    ]
    # the function that a ground truth may call, which the definition's digest leaves out
    called = [tag for tag in entry.definition.get("tags") or () if tag.startswith(FUNCTION) and not is_reference]
    facts = [entry.scaled_down, entry.no_oracle, called, entry.nonce if is_reference else 0]
    code = [settings.code, settings.weak if is_reference else False]
    return digest_json([entry.digest, facts, cases, name, code, records])


class _Calls:
    """Counts a job's calls that are done, by status; str() of it is a line of progress."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total = label, total
        self._tally: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, _implementation: str, _definition: str, _case: str, status: str) -> None:
        """Count one call that ended."""
        with self._lock:
            self._tally[status] += 1

    def __str__(self) -> str:
        with self._lock:
            counts = ", ".join(f"{key} {value}" for key, value in sorted(self._tally.items()))
            done = self._tally.total()  # a call is repeated where a process died
        return f"{self._label}  {done}/{max(self._total, done)} calls, {counts or 'none ended yet'}"


def graded(rows: Iterable[VerdictRow]) -> list[VerdictRow]:
    """A definition's rows; a grade is added to outputs of the reference that passed, not by a user's tolerance."""
    all_rows = list(rows)
    passed = [row for row in all_rows if row.verdict is Verdict.PASS and row.output != WHOLE]
    by_truths = {(row.case, row.output) for row in passed if row.implementation in TRUTHS}

    def grade(row: VerdictRow) -> Grade:
        a_truth_passed = (row.case, row.output) in by_truths
        if row.scaled_down:
            return Grade.SCALED_DOWN
        if row.against == SHADOW:
            return Grade.AGREED if a_truth_passed else Grade.CONSISTENT
        if row.constants:
            return Grade.CONSISTENT
        return Grade.PROVED if a_truth_passed else Grade.CHECKED

    graded_rows = {id(row) for row in passed if row.implementation == REFERENCE and row.tolerance is None}
    return [row.changed(grade=grade(row)) if id(row) in graded_rows else row for row in all_rows]


REPLAY = "replay"  # folder of replay bundles, in a run's folder


def finished(rows: Sequence[VerdictRow], entry: PlannedDefinition, *, options: str, run: Path) -> list[VerdictRow]:
    """The rows with complete repeat commands; writes a replay bundle of every failing case below `run`.

    A bundle, `<run>/replay/<op_type>/<definition>/<case>-<implementation>/replay.json`, holds the definition, the
    case with its seed (inputs are a pure function of these), the failing rows, and the command that repeats it.
    `options` are the run's own command-line options.
    """
    complete: list[VerdictRow] = []
    failing: dict[str, list[VerdictRow]] = {}
    for row in rows:
        full_row = row.changed(repeat=row.command(options))
        if row.verdict == Verdict.FAIL and PAIR not in row.implementation:
            folders = path_part(entry.definition["name"]), path_part(f"{row.case}-{row.implementation}")
            bundle = Path(REPLAY, path_part(row.op_type, OP_TYPE), *folders).as_posix()
            full_row = full_row.changed(replay=bundle)
            failing.setdefault(bundle, []).append(full_row)
        complete.append(full_row)
    cases = {planned.id: planned.case.as_json() for planned in entry.cases}
    for bundle, failures in failing.items():
        first = failures[0]
        content = {"repeat": first.repeat, "case": cases[str(first.case)], "definition": entry.definition}
        write_json(run / bundle / "replay.json", {**content, "rows": [row.as_json() for row in failures]})
    return complete
