"""The checker: refuses a bundle that breaks the dataset's review rules. Every problem found is reported."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import safetensors

from traceproof.dataset.definition import Definition
from traceproof.dataset.records import EvaluationStatus, SafetensorsInput, Solution, Trace
from traceproof.dataset.tree import LFS_POINTER, strict_json
from traceproof.publish.bundle import TABLE, Base, Bundle, Kind, card_problems, traces_path
from traceproof.publish.change import Change
from traceproof.publish.ledger import STATUS, tagged

SECRET = re.compile(rb"hf_[A-Za-z0-9]{20,}|HF_TOKEN\s*=\s*\S|-----BEGIN [A-Z ]*PRIVATE KEY")
# Torch's names of a safetensors file's dtypes, where letters and bits do not tell.
DTYPES = {
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
LETTERS = {"I": "int", "U": "uint", "F": "float", "BF": "bfloat", "C": "complex"}
LARGEST = 10 << 20  # bytes of one file; the hub takes no larger one outside LFS, and nothing here needs it


def problems(bundle: Bundle, change: Change, base: Base) -> list[str]:
    """Why a bundle may not be published on top of a base; empty: it may."""
    checker = _Checker(bundle, change, base)
    return [*change.problems, *checker.found()]


class _Checker:
    def __init__(self, bundle: Bundle, change: Change, base: Base) -> None:
        self.bundle = bundle
        self.base = base
        self.files = dict(change.files)
        for piece in bundle.pieces:
            if piece.path in change.same:
                self.files[piece.path] = base.read(piece.path) or piece.data
        self.present = base.paths() | self.files.keys()
        self.solutions: dict[str, Solution] = {}
        self.named_blobs: set[str] = set()
        self.uuids: dict[str, set[str]] = {}

    def found(self) -> Iterator[str]:
        """All problems, files in an order in which each finds what it refers to."""
        order = [Kind.DEFINITION, Kind.SOLUTION, Kind.WORKLOADS, Kind.TRACES, Kind.TEST, Kind.BLOB]
        order += [Kind.CARD, Kind.VIEWER]
        for name in self.bundle.definitions:
            yield from self._complete(name)
        kinds: dict[Kind, list[str]] = {kind: [] for kind in order}
        for path in sorted(self.files):
            problem = _bad_path(path, is_card=not self.bundle.definitions)
            if problem:
                yield problem
            else:
                kinds[Kind(path.partition("/")[0])].append(path)
        for kind in order:
            for path in kinds[kind]:
                yield from (f"{path}: {text}" for text in self._file(kind, path))

    def _complete(self, name: str) -> Iterator[str]:
        definition = self.bundle.definitions[name]
        path = f"definitions/{definition.op_type}/{name}.json"
        if path not in self.files:
            yield f"{path}: the bundle is about it but does not hold it"
        standing = self.bundle.standings[name]
        if tagged(definition, standing) != definition.tags or not standing.verified:
            yield f"{path}: its {STATUS}* tag is not what the ledger says"

    def _file(self, kind: Kind, path: str) -> Iterator[str]:
        data = self.files[path]
        if len(data) > LARGEST:
            yield f"{len(data)} bytes; the limit is {LARGEST}"
        if SECRET.search(data):
            yield "holds what looks like a secret"
        check = {
            Kind.DEFINITION: self._definition,
            Kind.SOLUTION: self._solution,
            Kind.WORKLOADS: self._workloads,
            Kind.TRACES: self._traces,
            Kind.TEST: self._test,
            Kind.BLOB: self._blob,
            Kind.CARD: self._card,
            Kind.VIEWER: self._card,
        }[kind]
        try:
            yield from check(path, data)
        # Not UTF-8, not JSON, not of the schema; what the base holds may be any JSON.
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            said = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
            yield f"does not fit the schema: {' '.join(said.split())[:300]}"

    def _owner(self, op_type: str, name: str) -> Definition | None:
        definition = self.bundle.definitions.get(name)
        return definition if definition is not None and definition.op_type == op_type else None

    def _definition(self, path: str, data: bytes) -> Iterator[str]:
        definition = Definition.model_validate(strict_json(data.decode()))
        if path != f"definitions/{definition.op_type}/{definition.name}.json":
            yield f"holds {definition.op_type}/{definition.name}"
        if self._owner(definition.op_type, definition.name) != definition:
            yield "is not what the bundle is about"

    def _solution(self, path: str, data: bytes) -> Iterator[str]:
        solution = Solution.model_validate(strict_json(data.decode()))
        definition = self.bundle.definitions.get(solution.definition)
        if definition is None:
            yield f"is for {solution.definition!r}, which the bundle is not about"
            return
        self.solutions[solution.name] = solution
        expected = f"solutions/{solution.author}/{definition.op_type}/{definition.name}/{solution.name}.json"
        if path != expected:
            yield f"author, definition and name say {expected}"
        entry = next(file.content for file in solution.sources if file.path == solution.entry_file)
        yield from _entry(entry, solution.entry_function, definition)
        if _shape(entry) == _shape(definition.reference):
            yield "is a copy of the reference"

    def _lines(self, path: str, data: bytes, folder: Kind) -> Iterator[tuple[int, Trace, Definition]]:
        """Lines that the bundle may bring; those of the base are its own business."""
        name = PurePosixPath(path).stem
        old = set((self.base.read(path) or b"").splitlines())
        for number, line in enumerate(data.splitlines(), start=1):
            trace = Trace.model_validate(strict_json(line.decode())) if line not in old else None
            if trace is None:
                if folder is Kind.WORKLOADS:
                    self._known(name, json.loads(line)["workload"])
                continue
            definition = self.bundle.definitions.get(trace.definition)
            if definition is None or path != _lines_path(folder, definition):
                raise ValueError(f"line {number} is for {trace.definition!r}")
            yield number, trace, definition

    def _known(self, name: str, workload: Mapping[str, Any]) -> None:
        """Take note of a workload that the base has."""
        self.uuids.setdefault(name, set()).add(str(workload["uuid"]))
        paths = [source.get("path", "") for source in workload["inputs"].values()]
        self.named_blobs.update(path.removeprefix("./") for path in paths)

    def _workloads(self, path: str, data: bytes) -> Iterator[str]:
        for number, trace, definition in self._lines(path, data, Kind.WORKLOADS):
            workload = trace.workload
            where = f"line {number}: "
            known = self.uuids.setdefault(definition.name, set())
            if not trace.is_workload:
                yield f"{where}carries a solution's result"
            if workload.uuid in known:
                yield f"{where}the uuid {workload.uuid} is there twice"
            known.add(workload.uuid)
            if set(workload.axes) != set(definition.var_axes):
                yield f"{where}axes are {sorted(workload.axes)}, the definition's {sorted(definition.var_axes)}"
                continue
            needed = {name for name, spec in definition.inputs.items() if not spec.optional}
            if not needed <= workload.inputs.keys() <= definition.inputs.keys():
                yield f"{where}inputs are {sorted(workload.inputs)}, the definition's {sorted(definition.inputs)}"
                continue
            for name, source in workload.inputs.items():
                if isinstance(source, SafetensorsInput):
                    yield from (f"{where}{name}: {text}" for text in self._tensor(definition, name, source, trace))

    def _tensor(self, definition: Definition, name: str, source: SafetensorsInput, trace: Trace) -> Iterator[str]:
        path = source.path.removeprefix("./")
        self.named_blobs.add(path)
        data = self.files.get(path) or (self.base.read(path) if path in self.present else None)
        if data is None:
            yield f"the blob {path} is neither in the bundle nor in the dataset"
            return
        if data.startswith(LFS_POINTER):
            return
        tensors = _tensors(data)
        if source.tensor_key not in tensors:
            yield f"{path} holds no {source.tensor_key!r}"
            return
        spec, (dtype, found) = definition.inputs[name], tensors[source.tensor_key]
        shape = list(definition.shape_of(spec, trace.workload.axes) or ())
        if found != shape or dtype != spec.dtype:
            yield f"is {dtype} {found}, the definition says {spec.dtype} {shape}"

    def _traces(self, path: str, data: bytes) -> Iterator[str]:
        for number, trace, definition in self._lines(path, data, Kind.TRACES):
            where = f"line {number}: "
            if trace.evaluation is None or trace.solution is None:
                yield f"{where}has no evaluation"
                continue
            if trace.evaluation.status is not EvaluationStatus.PASSED:
                yield f"{where}status is {trace.evaluation.status}; only PASSED traces are published"
            if trace.solution not in self.solutions:
                yield f"{where}solution {trace.solution!r} is not in the bundle"
            if trace.workload.uuid not in self.uuids.get(definition.name, set()):
                yield f"{where}workload {trace.workload.uuid} is no line of the definition's workloads"

    def _test(self, path: str, data: bytes) -> Iterator[str]:
        leaf = path.removeprefix("tests/references/")
        allowed = {"conftest.py", *(f"test_{name}.py" for name in self.bundle.definitions)}
        if leaf == path or leaf not in allowed:
            yield "is no test of the bundle's definitions"
        ast.parse(data)

    def _card(self, path: str, data: bytes) -> Iterator[str]:
        yield from card_problems(path, data, self.present)

    def _blob(self, path: str, data: bytes) -> Iterator[str]:
        parts = PurePosixPath(path).parts
        if parts[1:2] != ("workloads",) or len(parts) != 5 or self._owner(parts[2], parts[3]) is None:
            yield "belongs to no definition of the bundle"
        if path not in self.named_blobs:
            yield "no workload line names it"
        _tensors(data)


def _lines_path(folder: Kind, definition: Definition) -> str:
    return (
        traces_path(definition)
        if folder is Kind.TRACES
        else f"{folder}/{definition.op_type}/{definition.name}.jsonl"
    )


def _bad_path(path: str, *, is_card: bool) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or str(pure) != path or "\\" in path:
        return f"{path!r}: not a plain relative path"
    laid_out = path in {Kind.CARD, TABLE} if is_card else pure.parts[0] in set(Kind) and len(pure.parts) >= 3
    if not laid_out:
        return f"{path}: outside the dataset's layout"
    return ""


def _entry(content: str, function: str, definition: Definition) -> Iterator[str]:
    """Problems of a Python solution's entry: it must take the definition's inputs by name."""
    for node in ast.parse(content).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            given = [item.arg for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if given != list(definition.inputs):
                yield f"{function} takes {given}, the definition's inputs are {list(definition.inputs)}"
            return
    yield f"there is no function {function}"


def _shape(code: str) -> str:
    """A module's code without comments, docstrings and formatting."""
    module = ast.parse(code)
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            node.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined] # it has one: that is where it came from
    return ast.dump(ast.Module([node for node in module.body if isinstance(node, ast.FunctionDef)], []))


def _tensors(data: bytes) -> dict[str, tuple[str, list[int]]]:
    """Tensors of a safetensors file: torch's dtype and shape by name. Raises ValueError: it is none."""
    try:
        found = safetensors.deserialize(data)  # type: ignore[no-untyped-call] # it has no types
    except safetensors.SafetensorError as error:
        raise ValueError(f"no safetensors file, or one that is cut short: {error}") from error
    return {name: (_dtype(about["dtype"]), about["shape"]) for name, about in found}


def _dtype(name: str) -> str:
    letters = name.rstrip("0123456789")
    return DTYPES.get(name) or f"{LETTERS.get(letters, letters)}{name.removeprefix(letters)}"
