"""The judge as a library: judges a user's functions, tensors and files by an op's float64 oracle.

`traceproof` exports the public names, and imports this module when one is first used. Definitions come first, then
reports, then the functions that judge: functions, cases, outputs, files.
"""

import atexit
import inspect
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path
from string import Formatter
from types import ModuleType
from typing import Any
from unittest import SkipTest

import torch

from traceproof.dataset.constraints import broken
from traceproof.dataset.definition import PUBLISHED_DTYPES, Definition
from traceproof.dataset.tree import closest, explain, find, read_file, read_tree
from traceproof.errors import TraceproofError
from traceproof.gradients import cases_with_gradients
from traceproof.gradients import rows as gradient_rows
from traceproof.judge.kernel_properties import DEMANDED, PROPERTIES
from traceproof.models.drafts import tensors
from traceproof.ops import registry
from traceproof.ops.adapter import sizes as sizes_of_axes
from traceproof.ops.base import TORCH_DTYPES, Values
from traceproof.ops.cases import ALL_SIZES, Case
from traceproof.reasons import Failure, Skip, Unavailable, Verdict
from traceproof.run.calls import poisoned
from traceproof.run.case import drawing_device, fingerprints, make_inputs, on_host, place
from traceproof.run.engine import Engine, this_interpreter
from traceproof.run.judging import JudgedCase, LargeCase, Right
from traceproof.run.plan import PlanSelection, planned_alone
from traceproof.run.schema import (
    REFERENCE,
    WHOLE,
    GateResult,
    PlannedCase,
    PlannedDefinition,
    VerdictRow,
    environment_of,
    for_op_type,
)
from traceproof.run.schema import place as place_of
from traceproof.run.tensors import plain_tensors
from traceproof.run.trusted import Implementation, named_outputs, notes_of, written
from traceproof.run.untrusted import CaseResult
from traceproof.run.workers import EngineSettings, Environment
from traceproof.solutions.judging import Judge, blocked, in_own_dataset, new_hidden_seed, target_of
from traceproof.solutions.reading import Candidate, expect_order, read
from traceproof.solutions.records import Certificate, JudgeSettings
from traceproof.solutions.suites import ATEN, operator_definition, problem_definition
from traceproof.stacks import MAIN, STACKS

OUTPUTS = "outputs"  # name of the implementation in reports if tensors are given, not a function
SIZES = ("small", "medium")
FLOATS = sorted(name for name in PUBLISHED_DTYPES & TORCH_DTYPES.keys() if TORCH_DTYPES[name].is_floating_point)
# The reference of a definition made from a form, which has only an oracle.
NO_REFERENCE = (
    "def run({}):\n    raise NotImplementedError('this definition was made of its form, and has no reference')\n"
)
Function = Callable[..., Any]
# a tensor; or tensors and numbers, by name or in the definition's order
Given = torch.Tensor | Mapping[str, Any] | Sequence[Any]
Axis = int | float  # a size, or a constant such as an epsilon


@dataclass(frozen=True, slots=True)
class NamedForm:
    """A form of an op_type, from which definitions are made; a table of forms.toml."""

    key: str
    op_type: str
    table: Mapping[str, Any]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the axes and constants that the user chooses."""
        texts = (self.table["name"], self.table["description"])
        return tuple(dict.fromkeys(name for text in texts for _, name, _, _ in Formatter().parse(text) if name))

    def definition(self, dtype: str, axes: Mapping[str, Axis]) -> Definition:
        """The definition with these sizes and constants. Raises TraceproofError: one is missing or unknown."""
        values = {**self.table.get("defaults", {}), **axes}
        problems = [f"{name} is missing" for name in self.parameters if name not in values]
        problems += [f"{name} is none of them" for name in axes if name not in self.parameters]
        if problems:
            defaults = {name: f" (or {value})" for name, value in values.items() if name not in axes}
            takes = ", ".join(f"{name}{defaults.get(name, '')}" for name in self.parameters)
            raise TraceproofError(f"{self.key} takes {takes}, and dtype", problems=problems)
        if dtype not in FLOATS:
            what = f"{self.key} can not have the dtype {dtype}; {closest(dtype, FLOATS)}"
            raise TraceproofError(what, todo=f"Forms have {', '.join(FLOATS)}.")
        inputs, outputs = tensors(self.table["inputs"], dtype), tensors(self.table["outputs"], dtype)
        of_tensors = [axis for spec in (*inputs.values(), *outputs.values()) for axis in spec["shape"] or ()]
        derived: dict[str, str] = self.table.get("derived", {})
        whole = {*of_tensors, *re.findall(r"[A-Za-z_]\w*", " ".join(derived.values()))}
        kinds = {name: Integral if name in whole else Real for name in axes}
        wrong = [
            f"{name} is {n!r}"
            for name, n in axes.items()
            if not isinstance(n, kinds[name]) or not (1 if name in whole else 0) <= n < math.inf
        ]
        if wrong:
            what = f"{self.key} takes sizes that are whole numbers from 1, and constants that are finite numbers"
            raise TraceproofError(what, problems=wrong)
        values = {name: int(n) if isinstance(n, Integral) else float(n) for name, n in values.items()}
        # The expressions are those of forms.toml, with axes as variables.
        others = {name: eval(text, {}, dict(values)) for name, text in derived.items()}  # noqa: S307
        sizes = others | {name: value for name, value in values.items() if isinstance(value, int)}
        chosen = [name for name in self.parameters if name in sizes]
        content = {
            "name": self.table["name"].format(**values).replace("-", "_"),
            "op_type": self.op_type,
            "description": self.table["description"].format(**values),
            "axes": {
                name: {"type": "const", "value": sizes[name]} if name in sizes else {"type": "var"}
                for name in dict.fromkeys([*of_tensors, *chosen])
            },
            "constraints": self.table.get("constraints"),
            "inputs": inputs,
            "outputs": outputs,
            "reference": NO_REFERENCE.format(", ".join(inputs)),
        }
        try:
            return Definition.model_validate(content)
        except ValueError as error:  # a size beyond all memory, or a name that gets too long by it
            raise TraceproofError(f"{self.key} can not have these sizes", problems=[explain(error)]) from None


@cache
def forms() -> Mapping[str, NamedForm]:
    """All forms by name."""
    text = Path(__file__).with_name("forms.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text).items()
    return {key: NamedForm(key, op_type, table) for op_type, forms in tables for key, table in forms.items()}


def form_of(name: str) -> NamedForm:
    """The form with a name, or the only one of an op_type. Raises TraceproofError: there is none, or several."""
    if name in forms():
        return forms()[name]
    several = [key for key, form in forms().items() if form.op_type == name]
    if several:
        raise TraceproofError(f"{name} has several forms", todo=f"Name one: {', '.join(several)}.")
    todo = "Give a definition (traceproof.definition: a file, or a name in a dataset), or one of "
    todo += f"{', '.join(forms())}."
    raise TraceproofError(f"there is no form {name}; {closest(name, forms())}", todo=todo)


def of_suite(of: object) -> bool:
    """Whether `of` is an operator of PyTorch or one of KernelBench's problems, whose reference users trust."""
    return isinstance(of, str | Path) and (str(of).startswith(ATEN) or str(of).endswith(".py"))


def of_form(of: object, dataset: object) -> bool:
    """Whether `of` is the name of a form, not a file or a definition in a dataset."""
    return isinstance(of, str) and dataset is None and not of.endswith(".json") and not of_suite(of)


def definition(
    of: str | Path | Definition,
    *,
    dtype: str | torch.dtype = "bfloat16",
    dataset: str | Path | None = None,
    **axes: Axis,
) -> Definition:
    """A definition: axes, inputs and outputs with their shapes and dtypes, by which cases are drawn and judged.

    Args:
        of: the name of a form (`"rmsnorm"`, `"gqa_paged_decode"`: docs/library.md lists them), a definition's JSON
            file, with `dataset` the name of a definition, an operator of PyTorch (`"aten::relu"`), or a problem of
            KernelBench's (a `.py` file); for the last two, PyTorch in float64 decides what is right.
        dtype: of the form's tensors without a fixed dtype.
        dataset: a folder in the layout of flashinfer-trace.
        axes: the form's sizes and constants, e.g. `hidden_size=4096, eps=1e-5`.

    Raises:
        TraceproofError: there is no such form or definition, or an axis is missing; the text lists them.
    """
    dtype = str(dtype).removeprefix("torch.")
    if of_form(of, dataset):
        return form_of(str(of)).definition(dtype, axes)
    if axes:
        raise TraceproofError(f"a definition has its own axes: {', '.join(axes)} can not be given")
    if of_suite(of):
        operator = str(of).startswith(ATEN)
        return operator_definition(str(of), dtype) if operator else problem_definition(Path(str(of)), weak=True)
    if isinstance(of, Definition):
        return of
    if not isinstance(of, str | Path):
        raise TraceproofError(f"{of!r} is no definition", todo="Give a form's name, a file, or one in a dataset.")
    if dataset is None:
        return read_file(Path(of).expanduser())
    return find(read_tree(Path(dataset), naming=[str(of)]), str(of)).definition


@dataclass(frozen=True)
class Report:
    """Results in all cases. `bool(report)`: nothing was wrong and every output was judged; `print(report)`."""

    name: str  # of the function, file or outputs
    definition: Definition
    rows: tuple[VerdictRow, ...]  # one per case and output, `*` for a call as a whole
    repeat: str = ""  # code that repeats a case; `{case}` stands for its id
    # one per case and differentiable input, if the function supports autograd
    gradients: tuple[VerdictRow, ...] = ()
    demands_gradients: bool = False  # whether wrong gradients count
    certificate: Certificate | None = None  # of isolated code

    @property
    def failures(self) -> tuple[VerdictRow, ...]:
        """Failures and errors. Bits that differ from call to call are reported, but do not count."""
        counted = (*self.rows, *(self.gradients if self.demands_gradients else ()))
        return tuple(row for row in counted if row.bad and row.reason != Failure.DETERMINISM)

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Outputs that were not judged."""
        passed = {row.output for row in self.rows if row.verdict is Verdict.PASS}
        outputs = self.definition.outputs.items()
        unjudged = tuple(name for name, spec in outputs if not spec.optional and name not in passed)
        judged = any(row.verdict is Verdict.PASS for row in self.gradients)
        return (*unjudged, "gradients") if self.demands_gradients and not judged else unjudged

    def __bool__(self) -> bool:
        accepted = self.certificate is None or self.certificate.accepted
        return accepted and not self.failures and not self.unjudged

    def __str__(self) -> str:
        failed = self.failures
        word = "WRONG" if failed else "NOT JUDGED" if self.unjudged else "RIGHT"
        device = next((row.device for row in self.rows if row.device), "")
        counts = f"{len({row.case for row in self.rows})} cases, {len(failed)} of {len(self.rows)} results bad"
        head = f"{word}: {self.name} for {self.definition.name}{f' on {device}' if device else ''}: {counts}"
        return "\n".join([head, *self._table(), *map(self._explained, failed)])

    def _table(self) -> Iterator[str]:
        """A line per row, in columns."""
        several = len({row.implementation for row in self.rows}) > 1
        note = "" if self.demands_gradients else " (not demanded)"
        table = [("", "case", "output", "verdict", "of limit", "")] + [
            (
                row.implementation if several else "",
                str(row.case),
                row.output,
                str(row.reason if row.bad else row.verdict),
                "" if row.gate is None or row.gate.margin is None else f"{row.gate.margin:.3g}",
                ["", *row.message.strip().splitlines()][-1].partition(";")[0]
                + (note if row in self.gradients and row.bad else ""),
            )
            for row in (*self.rows, *self.gradients)
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for cells in table:
            yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()

    def _explained(self, row: VerdictRow) -> str:
        """A failure in detail."""
        sizes = ", ".join(f"{name}={size}" for name, size in row.axes.items())
        lines = [f"\n{row.case} ({sizes}), {row.output}: {row.reason}"]
        known = row.arbitration.recognised if row.arbitration is not None else ()
        message = row.message.partition(";")[0] if row.arbitration is not None else row.message.strip()
        lines += [f"  {line}" for line in message.splitlines()]
        lines += [f"  {place_of(worst, row.against, row.implementation)}" for worst in row.worst]
        lines += [f"  looks like: {bug}" for bug in known]
        lines += [f"  again: {self.repeat.replace('{case}', str(row.case))}"] if self.repeat else []
        return "\n".join(lines)


class CalledHere(Implementation):
    """A user's function, called with the inputs in the definition's order.

    Memory that it allocates with `torch.empty` and the like is filled with NaN, so that elements it never writes
    show.
    """

    doubted = True

    def __init__(self, function: Function, definition: Definition) -> None:
        """Raises TraceproofError: it takes neither the inputs nor the inputs and the outputs."""
        super().__init__(name_of(function))
        self.function = function
        self.takes_outputs = False
        inputs, outputs = len(definition.inputs), len(definition.outputs)
        try:
            signature = inspect.signature(function, follow_wrapped=False)
            if any(one.kind is one.VAR_POSITIONAL for one in signature.parameters.values()):
                signature = inspect.signature(function)  # of what a decorator hands all arguments to
        except (TypeError, ValueError):  # it has no signature, as with some builtins
            return
        if not _takes(signature, inputs):
            self.takes_outputs = _takes(signature, inputs + outputs)
            if not self.takes_outputs:
                raise TraceproofError(
                    f"{self.name}{signature} does not take the inputs of {definition.name}",
                    todo=f"It is called with {', '.join(definition.inputs)} in this order and returns "
                    f"{', '.join(definition.outputs)}, or takes these after the inputs and writes to them.",
                )
        expect_order([*signature.parameters], definition, f"{self.name}{signature}")

    def run(self, definition: Definition, inputs: Values) -> Any:  # noqa: ANN401 - what it returns
        """One call; returns outputs as the function does, or by name if it writes to them."""
        with poisoned():
            if not self.takes_outputs:
                return self.function(*inputs.values())
            axes = {**self.axes, **sizes_of_axes(definition, inputs)}  # a sampler's repeated rows are more
            outputs = {
                name: torch.empty(
                    definition.shape_of(spec, axes) or (), dtype=TORCH_DTYPES[spec.dtype], device=self.device
                )
                for name, spec in definition.outputs.items()
            }
            self.function(*inputs.values(), *outputs.values())
            return outputs


def name_of(function: Function) -> str:
    """A function's name in reports."""
    return str(getattr(function, "__name__", type(function).__name__))


def _takes(signature: inspect.Signature, count: int) -> bool:
    """Whether a function can be called with `count` positional arguments."""
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def check(  # noqa: PLR0913 - all but one have defaults
    function: Function | str | Path,
    of: str | Path | Definition | None = None,
    *,
    sizes: Sequence[str] = SIZES,
    cases: Sequence[str] = (),
    seed: int = 0,
    tolerance: float | None = None,
    gradients: bool | Sequence[str] = False,
    isolated: bool = False,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "bfloat16",
    dataset: str | Path | None = None,
    **axes: Axis,
) -> Report:
    """Call a function on inputs that kernels find hard, and judge its outputs; in this process, on one CPU thread.

    Args:
        function: takes the definition's inputs by position, in its order, and returns its outputs: one tensor, a
            sequence, or a mapping by name. One that also takes the outputs, after the inputs, writes to them. Or
            a file with one, as `traceproof judge` reads it: `kernel.py`, `kernel.py::function`, a module with
            `ModelNew`, a file in BackendBench's folders.
        of: as in `definition`; None: what the file names.
        sizes: out of small, medium, large, stress; edge and adversarial cases are always there.
        cases: ids of cases, as in a report; empty: all.
        seed: of the inputs.
        tolerance: atol and rtol instead of the calibrated limits; proves nothing.
        gradients: whether wrong gradients count, or for which inputs. If the function supports autograd, those of
            one case are reported anyway; if they count, all cases' are compared.
        isolated: True for code that you do not trust: its file runs in separate processes, also on hidden cases,
            and its side effects are judged, as by `judge_file`.
        device: `cpu` or `cuda`, for the inputs; None: CUDA if there is a GPU.
        dtype: as in `definition`.
        dataset: likewise.
        axes: likewise.

    Raises:
        TraceproofError: there is no such definition or case, or the function does not take its inputs.
    """
    candidate = _candidate_of(function) if isolated or not callable(function) else None
    of = of or (candidate.definition if candidate is not None else "") or ""
    if not of:
        named = name_of(function) if callable(function) else function
        what = f"{named} does not say which definition it implements"
        raise TraceproofError(what, todo="Name one: check(f, of).")
    _expect_usable(sizes=sizes, seed=seed, tolerance=tolerance)
    sizes = _texts(sizes)
    if isolated:
        if gradients or cases:
            raise TraceproofError("what is isolated is judged in all cases, and without its gradients")
        assert candidate is not None
        settings = JudgeSettings(
            sizes=sizes, seed=seed, hidden_seed=new_hidden_seed(), tolerance=tolerance, gpu=_on_gpu(device)
        )
        specification, certificate = _certificate(candidate, of, settings, dtype=dtype, dataset=dataset, axes=axes)
        return _reported(certificate, specification)
    if candidate is not None:
        function = _imported(candidate)
    specification = definition(of, dtype=dtype, dataset=dataset, **axes)
    assert callable(function)
    called = CalledHere(function, specification)
    named = called.name if candidate is None else repr(candidate.path)
    repeat = _line(
        check, named, of, axes, dtype=dtype, dataset=dataset, sizes=sizes, seed=seed,
        tolerance=tolerance, gradients=gradients, device=device, cases=["{case}"],
    )  # fmt: skip
    selection = PlanSelection(sizes=sizes, seed=seed, cases=_texts(cases), boundaries=True)
    entry, weak = planned_alone(specification, selection), of_suite(of)
    return _checked(called, entry, repeat, device=device, tolerance=tolerance, gradients=gradients, weak=weak)


def _line(function: Function, named: str, of: object, axes: Mapping[str, Axis], **options: Any) -> str:  # noqa: ANN401
    """Code that calls a public function with these axes and options, without defaults."""
    parameters, keywords = inspect.signature(function).parameters, dict[str, object](axes)
    for name, value in options.items():
        named_by_text = isinstance(value, torch.dtype | torch.device | Path)
        shown = str(value).removeprefix("torch.") if named_by_text else value
        if shown != parameters[name].default:
            keywords[name] = shown
    words = [named, "definition" if isinstance(of, Definition) else repr(str(of))]
    words += [f"{name}={value!r}" for name, value in keywords.items()]
    return f"traceproof.{function.__name__}({', '.join(words)})"


def _texts(value: str | Sequence[str]) -> tuple[str, ...]:
    """Texts as a tuple; one alone counts as a sequence of one."""
    return (value,) if isinstance(value, str) else tuple(value)


def _expect_usable(*, sizes: Sequence[str] = (), seed: int = 0, tolerance: float | None = None) -> None:
    """Raise TraceproofError if no cases can be judged with a size, the seed or the tolerance."""
    problems = [
        f"{size!r} is no size; there are {', '.join(ALL_SIZES)}" for size in _texts(sizes) if size not in ALL_SIZES
    ]
    if not isinstance(seed, Integral) or not 0 <= seed < 1 << 63:
        problems.append(f"the seed is {seed!r}, no whole number from 0 to 2^63 - 1")
    if tolerance is not None and not (isinstance(tolerance, Real) and 0 <= tolerance < math.inf):
        problems.append(f"the tolerance is {tolerance!r}, no finite number from 0")
    if problems:
        raise TraceproofError("no cases can be judged like that", problems=problems)


def _device_of(device: str | torch.device | None) -> str:
    """The device's name; None: a GPU if there is one. Raises TraceproofError: it is neither that nor the CPU."""
    name = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if name.partition(":")[0] not in {"cpu", "cuda"}:
        raise TraceproofError(f"device {name}: cpu or cuda")
    return name


def _on_gpu(device: str | torch.device | None) -> bool:
    """Whether to put inputs on a GPU. Raises TraceproofError: there is none, or no such device."""
    name = _device_of(device)
    if _no_gpu(name):
        raise TraceproofError(f"device {name}: there is no GPU here")
    return name.startswith("cuda")


def _no_gpu(device: str) -> Unavailable | None:
    """Why nothing can run on a device; None: it can."""
    if device.startswith("cpu") or torch.cuda.is_available():
        return None
    return Unavailable(Skip.NO_CUDA, "there is no GPU here")


def _candidate_of(function: Function | str | Path) -> Candidate:
    """The solution in a file, or that a function is. Raises TraceproofError: several, or none in a file."""
    if not callable(function):
        if not isinstance(function, str | Path):
            raise TraceproofError(f"{type(function).__name__} is no function", todo="Give one, or its file.")
        path, _, entry = str(function).partition("::")
        candidates = read(Path(path).expanduser(), entry or None)
        if len(candidates) > 1:
            raise TraceproofError(f"{path} holds {len(candidates)} solutions", todo="Give the file of one.")
        return candidates[0]
    name = name_of(function)
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file() or getattr(function, "__qualname__", "") != name:
        what = f"{name} has no file to run it from: what is isolated runs in another process"
        todo = "Define it at the top level of a file, or give that: check('kernel.py::function', ...)."
        raise TraceproofError(what, todo=todo)
    return read(Path(file), name)[0]


def _imported(candidate: Candidate) -> Function:
    """A file's function, imported into this process. Raises TraceproofError: it is compiled."""
    file, _, name = candidate.entry.partition("::")
    if not file.endswith(".py"):
        todo = "Give isolated=True, or load it yourself and give its function."
        raise TraceproofError(f"{candidate.path} is compiled: {candidate.language}", todo=todo)
    module = ModuleType(f"{Path(file).stem} (judged)")  # no name by which another module can be imported
    module.__file__ = candidate.path
    sys.modules[module.__name__] = module  # Triton and dataclasses look for it there
    exec(compile(candidate.files[file], candidate.path, "exec"), vars(module))  # noqa: S102 - its user's own code
    function: Function = getattr(module, name)
    function.__name__ = candidate.name
    return function


def _reported(certificate: Certificate, definition: Definition) -> Report:
    """A certificate as a report, with a row for each demanded property that is broken."""
    shared: dict[str, Any] = {"definition": definition.name, "op_type": definition.op_type}
    shared |= {"implementation": certificate.solution, **certificate.model_dump(include={"against", "device"})}
    rows = [
        VerdictRow(
            **shared,
            **result.model_dump(exclude={"variant", "margin", "message"}),
            message=f"{result.variant}: {result.message}" if result.variant else result.message,
            gate=None if result.margin is None else GateResult(kind="gate", margin=result.margin),
        )
        for result in certificate.rows
    ]
    shared |= {"case": "property", "output": WHOLE, "verdict": Verdict.FAIL}
    broken = [one for one in certificate.properties if one.bad]
    rows += [VerdictRow(**shared, reason=one.name, message=one.detail) for one in broken]
    return Report(certificate.solution, definition, tuple(rows), certificate.repeat, certificate=certificate)


def _checked(  # noqa: PLR0913 - of two callers
    called: CalledHere,
    entry: PlannedDefinition,
    repeat: str,
    *,
    device: str | torch.device | None,
    tolerance: float | None,
    gradients: bool | Sequence[str] = False,
    weak: bool = False,
) -> Report:
    """A function's report in planned cases; with gradients if they are demanded or no row is bad."""
    definition, demanded = entry.parsed, bool(gradients)
    of_inputs = () if isinstance(gradients, bool) else _texts(gradients)
    unknown = [name for name in of_inputs if name not in definition.inputs]
    if unknown:
        inputs = ", ".join(definition.inputs)
        raise TraceproofError(f"{definition.name} has the inputs {inputs}, not {', '.join(unknown)}")
    of_gradients: list[VerdictRow] = []
    with _engine(device, functions={called.name: called}, tolerance=tolerance, weak=weak) as engine:
        rows = engine.rows(entry, [called.name])
        # with wrong answers, gradients are reported only if demanded
        reported = demanded or not any(row.bad for row in rows)
        if reported and entry.no_oracle is None and not called.takes_outputs:
            call = partial(called.run, definition)
            for case in cases_with_gradients(entry.cases, demanded=demanded):
                of_gradients += gradient_rows(
                    call, entry, case, name=called.name, device=engine.device, demanded=of_inputs or demanded
                )
    return Report(called.name, definition, tuple(rows), repeat, tuple(of_gradients), demanded)


@contextmanager
def _engine(
    device: str | torch.device | None,
    **settings: Any,  # noqa: ANN401 - fields of EngineSettings
) -> Iterator[Engine]:
    """An engine in this process; at exit, torch's number of threads is restored."""
    threads = torch.get_num_threads()
    main = this_interpreter(on_gpu=_on_gpu(device))
    others = {
        name: Environment(name=name, python=sys.executable, record=main.record)
        for name, stack in STACKS.items()
        if name != MAIN and stack.package and find_spec(stack.package) is not None
    }
    try:
        with Engine(EngineSettings(environments={MAIN: main, **others}, **settings)) as engine:
            yield engine
    finally:
        torch.set_num_threads(threads)


def verify(  # noqa: PLR0913 - all but one have defaults
    of: str | Path | Definition,
    *,
    sizes: Sequence[str] = SIZES,
    seed: int = 0,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "bfloat16",
    dataset: str | Path | None = None,
    **axes: Axis,
) -> Report:
    """Judge a definition's reference, isolated, and the ground truths whose packages are installed here.

    The arguments are those of `check`. A definition made from a form has no reference.
    """
    _expect_usable(sizes=sizes, seed=seed)
    specification = definition(of, dtype=dtype, dataset=dataset, **axes)
    with _engine(device) as engine:
        every = for_op_type(specification.op_type)
        names = [name for name in every if environment_of(name) in engine.environments]
        if specification.reference == NO_REFERENCE.format(", ".join(specification.inputs)):
            names.remove(REFERENCE)
        selection = PlanSelection(sizes=_texts(sizes), seed=seed)
        rows = engine.rows(planned_alone(specification, selection), names)
    return Report(", ".join(names), specification, tuple(rows))


@dataclass(frozen=True, eq=False, repr=False)
class DrawnCase:
    """One case of a definition: inputs, expected outputs, and a judge of outputs."""

    definition: Definition
    planned: PlannedCase
    no_oracle: str | None  # why there are no expected values; None: there are
    device: str
    tolerance: float | None = None
    given: Values | None = None  # inputs, if they are not to be drawn
    repeat: str = ""

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.planned.case.axes.items())
        return f"<{self.definition.name} {self.id}: {sizes}>"

    @property
    def id(self) -> str:
        """The case's id, unique in its definition."""
        return self.planned.id

    @property
    def unavailable(self) -> Unavailable | None:
        """Why it can not be judged here; None: it can."""
        if self.planned.skip is not None:
            return self.planned.skip
        if self.no_oracle is not None:
            return Unavailable(Skip.NO_ORACLE, self.no_oracle)
        return _no_gpu(self.device)

    @property
    def axes(self) -> Mapping[str, int]:
        """The sizes of all axes."""
        return {**self.definition.const_axes, **self.planned.case.axes}

    @property
    def draws(self) -> int:
        """How often a sampler draws, with outputs stacked along a new first axis; 0: it is no sampler."""
        return self.planned.trials

    @cached_property
    def inputs(self) -> Mapping[str, Any]:
        """Inputs by name, in the order of arguments: tensors on the device, numbers, None for omitted ones."""
        return self._drawn() if self.given is None else self.given

    def _drawn(self) -> Values:
        case, device = self.planned.case, torch.device(self.device)
        where = drawing_device(self.definition, case, device)
        return place(make_inputs(self._op, self.definition, case, device=where), device)

    @cached_property
    def _original(self) -> Values:
        """The inputs on the CPU, drawn again, since the caller may have changed `inputs`."""
        return on_host(self._drawn() if self.given is None else dict(self.given))

    @cached_property
    def _op(self) -> Any:  # noqa: ANN401 - an op; `registry` imports it lazily
        return registry.for_definition(self.definition)[0]

    @cached_property
    def expected(self) -> Mapping[str, torch.Tensor]:
        """The oracle's outputs on the CPU: float64 in each output's shape; integers keep their dtype.

        Further entries are named `output@what`: the error of a naive computation, a sampler's probabilities. Empty
        if there is no oracle.
        """
        return {} if self.no_oracle is not None else self._op.expected(self.definition, self._original)

    def judged(
        self,
        outputs: Any,  # noqa: ANN401 - a function, tensors, or a mapping of them
        *,
        gradients: bool | Sequence[str] = False,
    ) -> Report:
        """Judge outputs: a tensor, a sequence, or a mapping by name; or the function that computes them.

        `gradients`, for a function, as in `traceproof.check`.
        """
        entry = PlannedDefinition.alone(self.definition, [self.planned], self.no_oracle)
        if callable(outputs):
            called = CalledHere(outputs, self.definition)
            return _checked(
                called, entry, self.repeat, device=self.device, tolerance=self.tolerance, gradients=gradients
            )
        if gradients:
            todo = "Give the function: case.check(function)."
            raise TraceproofError("outputs alone have no gradients", todo=todo)
        returned = named_outputs(self.definition, outputs)
        drawn = [value for value in returned.values() if isinstance(value, torch.Tensor)]
        if self.draws and any(value.shape[:1] != (self.draws,) for value in drawn):
            raise TraceproofError(
                f"{self.definition.name} draws at random, and is judged by {self.draws} calls on these inputs",
                todo="Give their outputs, stacked along a new first axis, or the function to check().",
            )
        changed = written(self._op, self.definition, dict(self.inputs))
        unseen = sorted(changed.keys() - returned.keys()) if self.given is not None else []
        if unseen:
            raise TraceproofError(
                f"{self.definition.name} also writes to {', '.join(unseen)}",
                todo="Give the outputs by name, and what these hold after the call beside them.",
            )
        present = {name: value for name, value in {**changed, **returned}.items() if value is not None}
        try:
            tensors = dict(zip(present, plain_tensors(list(present.values())), strict=True))
        except TypeError as error:
            raise TraceproofError(str(error), todo="Give tensors, as torch.from_numpy(array) does.") from None
        on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in present.values())
        before = fingerprints(self._original)
        notes = notes_of(self._op, self.definition, dict(self.inputs), returned, before)
        case = JudgedCase(
            entry=entry,
            definition=self.definition,
            op=self._op,
            planned=self.planned,
            results={OUTPUTS: CaseResult(outputs=tensors, on_gpu=on_gpu, **notes)},
            right=Right(oracle={} if self.planned.large else dict(self.expected)),
            records={OUTPUTS: {}},
            tolerance=self.tolerance,
            inputs=self._original,
        )
        if self.planned.large:
            case.large = LargeCase(case, figures=False).rulings(torch.device(self.device))
        rows = tuple(case.explained(row) for row in case.every)
        return Report(OUTPUTS, self.definition, rows, self.repeat)

    def check(self, outputs: Any, *, gradients: bool | Sequence[str] = False) -> None:  # noqa: ANN401 - as `judged`
        """Judge outputs as `judged` does. Raises AssertionError: they are wrong, or could not be judged."""
        __tracebackhide__ = True
        report = self.judged(outputs, gradients=gradients)
        if not report:
            raise AssertionError(str(report))


@dataclass(frozen=True, repr=False)
class IsolatedCases:
    """All cases of a definition at once, also hidden ones, in which a file is judged, isolated."""

    of: str | Path | Definition
    options: Mapping[str, Any]  # for `check`
    repeat: str = ""
    id = "isolated"

    @cached_property
    def definition(self) -> Definition:
        """The definition to judge by."""
        others = ("sizes", "seed", "tolerance", "device", "cases", "gradients")
        return definition(self.of, **{name: value for name, value in self.options.items() if name not in others})

    @property
    def unavailable(self) -> Unavailable | None:
        """Why nothing can be judged here; None: it can."""
        return _no_gpu(_device_of(self.options.get("device")))

    def judged(self, function: Function | str | Path) -> Report:
        """Judge a file, or the file of a function. Raises SkipTest: its kernel needs a GPU, and there is none."""
        why = blocked(_candidate_of(function), gpu=_on_gpu(self.options.get("device")))
        if why is not None:
            raise SkipTest(f"{Skip.NO_CUDA}: {why}")
        return check(function, self.of, isolated=True, **self.options)

    def check(self, function: Function | str | Path) -> None:
        """Judge it as `judged` does. Raises AssertionError: it is refused."""
        __tracebackhide__ = True
        report = self.judged(function)
        if not report:
            raise AssertionError(str(report))


def cases(  # noqa: PLR0913 - all but one have defaults
    of: str | Path | Definition,
    *,
    sizes: Sequence[str] = SIZES,
    cases: Sequence[str] = (),
    seed: int = 0,
    tolerance: float | None = None,
    device: str | torch.device | None = None,
    unavailable: bool = False,
    dtype: str | torch.dtype = "bfloat16",
    dataset: str | Path | None = None,
    **axes: Axis,
) -> Iterator[DrawnCase]:
    """The cases of a definition, one by one; inputs and expected outputs are computed when they are first used.

    The arguments are those of `check`; `unavailable`: whether to include cases that can not be judged here.
    """
    specification = definition(of, dtype=dtype, dataset=dataset, **axes)
    _expect_usable(sizes=sizes, seed=seed, tolerance=tolerance)
    selection = PlanSelection(sizes=_texts(sizes), seed=seed, cases=_texts(cases), boundaries=True)
    planned = planned_alone(specification, selection)
    name = _device_of(device)
    for case in (case for case in planned.cases if not case.hidden):
        drawn = DrawnCase(specification, case, planned.no_oracle, name, tolerance)
        if unavailable or drawn.unavailable is None:
            yield drawn


def assert_right(  # noqa: PLR0913 - all but three have defaults
    of: str | Path | Definition,
    inputs: Given,
    outputs: Any,  # noqa: ANN401 - a tensor, a sequence, or a mapping
    *,
    tolerance: float | None = None,
    dtype: str | torch.dtype | None = None,
    dataset: str | Path | None = None,
    **axes: Axis,
) -> None:
    """Judge outputs that were computed elsewhere: one call's inputs, and what came of it.

    Args:
        of: as in `definition`; sizes and dtypes that the inputs show can be left out.
        inputs: by name, or in the definition's order; with the shapes that it states.
        outputs: likewise; or the tensor, for an op with one output.
        tolerance: atol and rtol instead of the calibrated limits.
        dtype: as in `definition`.
        dataset: likewise.
        axes: likewise.

    Raises:
        AssertionError: they are wrong; the text is the report.
        TraceproofError: the inputs are not those of the definition, or it has no oracle.
    """
    __tracebackhide__ = True
    if of_form(of, dataset):
        specification = _shown_by(inputs, str(of), dtype, axes)
    else:  # all its dtypes are stated
        specification = definition(of, dtype="bfloat16", dataset=dataset, **axes)
    values = _named(specification.name, list(specification.inputs), inputs)
    sizes = _sizes({name: spec.shape for name, spec in specification.inputs.items()}, values)
    op, unknown = registry.for_definition(specification)
    problems = [] if unknown is None else [f"there is no oracle: {unknown}"]
    problems += _misfits(specification, values, sizes)
    if problems:
        raise TraceproofError(f"these are no inputs of {specification.name}", problems=problems)
    # an axis of outputs alone is 0: it follows from others, or is not checked
    var = {axis: sizes.get(axis, 0) for axis in specification.var_axes}
    case = op.settled(specification, Case("given", "given", var, 0))
    planned = PlannedCase(
        case=case,
        digest=case.digest,
        memory=op.memory(specification, case),
        trials=op.trials(specification, case),
        skip=None,
        large=False,
        nonce=0,
    )
    ordered = {name: values.get(name) for name in specification.inputs}
    tensor = next((value for value in ordered.values() if isinstance(value, torch.Tensor)), None)
    device = "cpu" if tensor is None else tensor.device.type
    _expect_usable(tolerance=tolerance)
    if callable(outputs):
        raise TraceproofError(f"{name_of(outputs)} is a function, not outputs", todo="Call it, or use check().")
    try:
        DrawnCase(specification, planned, None, device, tolerance, ordered).check(outputs)
    except (IndexError, RuntimeError) as error:  # of the oracle
        what = f"{specification.name} can not be computed of these inputs: {type(error).__name__}: {error}"
        todo = "Indices, offsets and lengths must lie within what they point into, and tensors must have values."
        raise TraceproofError(what, todo=todo) from error


def _shown_by(
    inputs: Given, form_name: str, dtype: str | torch.dtype | None, axes: Mapping[str, Axis]
) -> Definition:
    """The definition of a form whose sizes and dtype, where the caller states none, are those of the inputs."""
    form = form_of(form_name)
    specs = tensors(form.table["inputs"], "")  # dtype "": the one that a definition of the form chooses
    values = _named(form_name, list(specs), inputs)
    sizes = _sizes({name: spec["shape"] for name, spec in specs.items()}, values)
    chosen = {name: size for name, size in sizes.items() if name in form.parameters}
    open_ones = (values.get(name) for name, spec in specs.items() if spec["dtype"] == "")
    dtypes = (value.dtype for value in open_ones if isinstance(value, torch.Tensor))
    return form.definition(str(dtype or next(dtypes, "bfloat16")).removeprefix("torch."), {**chosen, **axes})


def _misfits(specification: Definition, values: Mapping[str, Any], sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield what is wrong with inputs of a definition, whose axes have these sizes."""
    for name, spec in specification.inputs.items():
        value = values.get(name)
        if value is None and not spec.optional:
            yield f"{name} is missing"
        elif isinstance(value, torch.Tensor) and value.dtype != TORCH_DTYPES[spec.dtype]:
            yield f"{name} is {value.dtype}, not {spec.dtype}"
        elif value is not None and spec.shape is not None and not isinstance(value, torch.Tensor):
            yield f"{name} is a {type(value).__name__}, not a tensor"
    for axis, size in specification.const_axes.items():
        if sizes.get(axis, size) != size:
            yield f"{axis} is {sizes[axis]}, not {size}"
    if (constraint := broken(specification, sizes)) is not None:
        yield f"it is not so that {constraint}"


def _named(of: str, names: Sequence[str], values: Given) -> dict[str, Any]:
    """Inputs by name, without those that are None. Raises TraceproofError: unknown names, or too many inputs."""
    values = [values] if isinstance(values, torch.Tensor) else values
    if not isinstance(values, Mapping | Sequence):
        raise TraceproofError(f"the inputs of {of} are a {type(values).__name__}", todo="Give a list or mapping.")
    if not isinstance(values, Mapping):
        too_many = [str(place) for place in range(len(names), len(values))]
        values = dict(zip([*names, *too_many], values, strict=False))
    strange = [f"there is no {name}" for name in values if name not in names]
    if strange:
        raise TraceproofError(f"{of} has the inputs {', '.join(names)}", problems=strange)
    given = {name: value for name, value in values.items() if value is not None}
    arrays = [
        f"{name} is a {type(value).__name__}, no tensor or number"
        for name, value in given.items()
        if not isinstance(value, torch.Tensor | Real | str) and getattr(value, "shape", None) != ()
    ]
    if arrays:
        what = f"these are no inputs of {of}"
        raise TraceproofError(what, problems=arrays, todo="Give tensors, as torch.from_numpy(array) does.")
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def _sizes(shapes: Mapping[str, Sequence[str] | None], values: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of axes, from the shapes of tensors. Raises TraceproofError: two of them disagree."""
    sizes: dict[str, tuple[int, str]] = {}
    problems = []
    for name, axes in shapes.items():
        value = values.get(name)
        if axes is None or not isinstance(value, torch.Tensor):
            continue
        if value.dim() != len(axes):
            problems.append(f"{name} has the shape {list(value.shape)}, expected [{', '.join(axes)}]")
        for axis, size in zip(axes, value.shape, strict=False):
            before, where = sizes.setdefault(axis, (size, name))
            if before != size:
                problems.append(f"{axis} is {before} in {where} and {size} in {name}")
    if problems:
        raise TraceproofError("the inputs do not belong together", problems=problems)
    return {axis: size for axis, (size, _) in sizes.items()}


def judge_file(  # noqa: PLR0913 - all but one have defaults
    file: str | Path,
    of: str | Path | Definition,
    *,
    sizes: Sequence[str] = SIZES,
    seed: int = 0,
    hidden_seed: int | None = None,
    tolerance: float | None = None,
    demand: Sequence[str] = (),
    timed: bool = False,
    whole: bool = False,
    weak: bool = False,
    dtype: str | torch.dtype = "bfloat16",
    dataset: str | Path | None = None,
    **axes: Axis,
) -> Certificate:
    """Judge an untrusted kernel, isolated, with this interpreter's packages; see `traceproof judge`.

    Args:
        file: a solution (`.json`, `.py`, `.cu`), or `FILE::FUNCTION`.
        of: as in `definition`.
        sizes: as in `check`.
        seed: of the public cases.
        hidden_seed: of cases that it can not know; None: random.
        tolerance: as in `check`.
        demand: more properties without which it is refused: `errors`, `batch`, ...
        timed: whether to measure its speed if it is accepted.
        whole: whether to call all cases; if not, the first wrong answer ends it.
        weak: whether to run it if isolation is incomplete.
        dtype: as in `definition`.
        dataset: likewise.
        axes: likewise.

    Raises:
        TraceproofError: it can not be read, called or isolated.
    """
    strange = [f"not {name}" for name in _texts(demand) if name not in PROPERTIES]
    if strange:
        raise TraceproofError(f"properties are {', '.join(PROPERTIES)}", problems=strange)
    _expect_usable(sizes=sizes, seed=seed, tolerance=tolerance)
    settings = JudgeSettings(
        sizes=_texts(sizes), seed=seed, hidden_seed=new_hidden_seed() if hidden_seed is None else hidden_seed,
        tolerance=tolerance, timed=timed, whole=whole, weak=weak, gpu=_on_gpu(None),
        demanded=(*dict.fromkeys((*DEMANDED, *_texts(demand))),),
    )  # fmt: skip
    return _certificate(_candidate_of(file), of, settings, dtype=dtype, dataset=dataset, axes=axes)[1]


def _certificate(  # noqa: PLR0913 - of two callers
    candidate: Candidate,
    of: str | Path | Definition,
    settings: JudgeSettings,
    *,
    dtype: str | torch.dtype,
    dataset: str | Path | None,
    axes: Mapping[str, Axis],
) -> tuple[Definition, Certificate]:
    """The definition, and the certificate of a solution judged by it."""
    if dataset is None:
        specification = definition(of, dtype=dtype, dataset=None, **axes)
        target = in_own_dataset(specification, specification.name if isinstance(of, Definition) else str(of))
    else:
        target = target_of(str(of), Path(dataset))
    repeat = _line(
        judge_file, repr(candidate.path), of, axes, sizes=settings.sizes, seed=settings.seed, dtype=dtype,
        dataset=dataset, hidden_seed=settings.hidden_seed, tolerance=settings.tolerance,
        demand=tuple(name for name in settings.demanded if name not in DEMANDED),
    )  # fmt: skip
    with target as resolved:
        return resolved.definition, _judge().judged(candidate, resolved, settings, repeat=repeat)


@cache
def _judge() -> Judge:
    """Judge of isolated code, one after the other, until this process ends or has not used it for long."""
    judge = Judge(lasting=False)
    atexit.register(judge.close)
    return judge
