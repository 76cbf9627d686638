"""Writes the text of a generated test file: constants, inputs, calls of ground truths, tests."""

import keyword
import math
import textwrap
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from traceproof.dataset.constraints import last_of
from traceproof.dataset.definition import Definition, TensorSpec
from traceproof.dataset.hints import Role, role_of
from traceproof.dataset.reference_text import assigned
from traceproof.judge.metrics import QUANTISED
from traceproof.ops import lookup, registry
from traceproof.ops.base import Values
from traceproof.ops.cases import SIZES, Case
from traceproof.ops.compare import Quantised
from traceproof.run.case import make_inputs
from traceproof.stacks import FIRST_TRUTHS, STACK_OF, STACKS, TRUTHS
from traceproof.testgen.calls import Call, Unemittable, folded
from traceproof.text import literal, names, printable, unquoted

LARGE = 16 << 20  # bytes of inputs from which on a scaled-down definition's are drawn and examined
# Names with other meanings in a test file, which constants can not have.
RESERVED = names(
    "DEFINITION OP_TYPE CONSTANTS MEMORY_GB TOLERANCES DRAWS TEST_SIZES TOLERANCE GROUND_TRUTHS CASES"
)
LARGEST = 512 << 20  # bytes of inputs that are examined at most
FEW = 64  # elements: for fewer, statistics say little, and storing them costs nothing
SIGMAS = 5.0  # deviation of a statistic, in standard errors, at which a sample is not standard normal
NORMAL = frozenset({torch.float32, torch.float16, torch.bfloat16})
INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
# Axes with the length of a sequence, if nothing else decides their size.
LENGTHS = frozenset({"seq_len", "num_tokens_per_seq", "max_seq_len", "T"})
HEAD = '''
{about}
"""

from __future__ import annotations

import sys

import pytest
import torch
from conftest import GroundTruth, ground_truth_or_skip

{constants}
'''
TESTS = '''
def test_constants(cheap_case):
    """The definition's constants are those above."""
    cheap_case.check_constants(CONSTANTS)


def test_output_shape(case):
    """Outputs have the shapes that the definition's axes give."""
    case.check_form("shape")


def test_output_dtype(case):
    """Outputs have the definition's dtypes."""
    case.check_form("dtype")


def test_numerical_correctness(case):
    """The reference is right: by traceproof's oracle, or without it by the first ground truth that runs."""
    case.check()


def test_determinism(cheap_case):
    """Equal inputs give equal bits, other inputs do not, and inputs stay as they are."""
    cheap_case.check_determinism()


def test_edge_cases(edge_case):
    """The reference is right in edge cases: single elements, zeros, and what traceproof has beside."""
    edge_case.check()


def test_ground_truths_match(case):
    """All ground truths that run here agree with each other."""
    case.check_ground_truths()
'''
VERSUS = '''
def test_correctness_vs_{name}(case):
    """The reference agrees with {calls}."""
    case.compare("reference", "{name}")
'''
GET = '''
def get_ground_truth(source, op_type=OP_TYPE, device="cpu"):
    """The call of a ground truth; the test is skipped, with the reason, where it can not run."""
    assert op_type == OP_TYPE
    return ground_truth_or_skip(GROUND_TRUTHS[source], source, device)
'''
MAIN = '''
def main():
    """Run the tests, and say how many agree with each ground truth."""
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))


if __name__ == "__main__":
    main()
'''
NO_INPUTS = '''
def generate_random_inputs(device="cpu", seed=0):
    """Inputs of this definition follow rules that only traceproof knows."""
    pytest.skip("no_inputs: {why}")
'''


def render(
    definition: Definition,
    divergences: Sequence[str] = (),
    *,
    sizes: Sequence[str] | None = None,
    tolerance: float | None = None,
) -> str:
    """The text of a definition's test file; `sizes` and `tolerance`: defaults of the tests' options."""
    name = unquoted(definition.name)
    about = [f'"""Tests of the reference of {name}.', "", f"Run: pytest tests/references/test_{name}.py -v -s"]
    about += ["", "It is known to diverge, so these tests fail:"] if divergences else []
    about += [f"- {unquoted(line)}" for line in divergences]
    drawn = Drawing(definition)
    constants = _constants(definition, drawn)
    constants += [] if sizes is None else [f"TEST_SIZES = {literal(tuple(sizes))}"]
    constants += [] if tolerance is None else [f"TOLERANCE = {literal(tolerance)}"]
    head = HEAD.format(about="\n".join(about), constants="\n".join(constants))
    tests = [TESTS, *(VERSUS.format(name=truth, calls=TRUTHS[truth].calls) for truth in served(definition))]
    blocks = [head, drawn.source, "\n\n".join(_calls(definition)), GET, *tests, MAIN]
    return "\n\n\n".join(block.strip("\n") for block in blocks) + "\n"


def _constants(definition: Definition, drawn: "Drawing") -> list[str]:
    """Assignments of const axes, of numbers that the reference names, and of constants that tests need."""
    lines = [f"DEFINITION = {literal(definition.name)}", f"OP_TYPE = {literal(definition.op_type)}"]
    values = {**definition.const_axes, **assigned(definition.reference)}
    upper = {name: name.upper() for name in values}
    taken = [*RESERVED, *upper.values()]
    # Each gets a name in the file, unless that is no identifier or has another meaning there.
    named = {name: text for name, text in upper.items() if text.isidentifier() and taken.count(text) == 1}
    lines += [f"{text} = {literal(values[name])}" for name, text in named.items()]
    pairs = [f"{literal(name)}: {named.get(name, literal(value))}" for name, value in values.items()]
    line = f"CONSTANTS = {{{', '.join(pairs)}}}"
    lines += [line] if len(line) <= 115 else ["CONSTANTS = {", *(f"    {pair}," for pair in pairs), "}"]
    lines.append(f"MEMORY_GB = {drawn.memory_gb:.2g}  # that its largest ordinary case takes, about")
    floats = {s.dtype for s in definition.inputs.values() if s.shape is not None and "float" in s.dtype}
    quantised = [name for name, kind in drawn.op.comparisons(definition).items() if isinstance(kind, Quantised)]
    if quantised:
        row = f"({QUANTISED.atol:g}, {QUANTISED.rtol:g}, {QUANTISED.hit_ratio:g})"
        dtypes = sorted({f"torch.{definition.outputs[name].dtype}: {row}" for name in quantised})
        lines.append(f"TOLERANCES = {{{', '.join(dtypes)}}}  # it computes with quantised values")
    elif floats - {"float32", "float64"} and any(spec.dtype == "float32" for spec in definition.outputs.values()):
        lines.append("TOLERANCES = {torch.float32: (1e-3, 1e-3, 1.0)}  # outputs are no more exact than inputs")
    return [*lines, "DRAWS = True  # its outputs are random draws"] if drawn.samples else lines


def served(definition: Definition) -> list[str]:
    """The ground truths that can be called for a definition, in order of priority."""
    return [name for name in TRUTHS if lookup.serving(name, definition) is not None]


def _calls(definition: Definition) -> list[str]:
    """Source of functions that load ground truths, one each, and of their table."""
    texts, rows = [], []
    for name in served(definition):
        adapter = lookup.serving(name, definition)
        package = STACKS[STACK_OF[name]].distribution
        sm = f", sm={adapter.sm}" if adapter is not None and adapter.sm else ""
        load = "None"
        try:
            if name in FIRST_TRUTHS:
                texts.append(Call(definition, name).function(f"load_{name}"))
                load = f"load_{name}"
        except Unemittable as why:
            rows.append(f"    # by traceproof alone: {printable(str(why))}")
        rows.append(f"    {literal(name)}: GroundTruth({load}, {literal(package)}{sm}),")
    return ["\n\n".join(texts), "\n".join(["GROUND_TRUTHS = {", *rows, "}"]) if rows else "GROUND_TRUTHS = {}"]


class Drawing:
    """Writes a definition's `generate_random_inputs`; it examines inputs of a case that the op draws.

    Attributes:
        memory_gb: GiB that the largest ordinary case needs.
        samples: whether outputs are random draws.
    """

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.op, _ = registry.for_definition(definition)
        planned = list(self.op.planned(definition, sizes=SIZES[:2], seed=0))
        ordinary = [case for case in planned if case.size in SIZES[:2]]  # no edge or adversarial ones
        self.memory_gb = max((self.op.memory(definition, case) for case in ordinary), default=0) / 2**30
        self.samples = any(self.op.trials(definition, case) for case in ordinary)
        self._lines: list[str] = []
        self._parameters: dict[str, int] = {}  # of the written function, with their defaults

    @cached_property
    def _case(self) -> Case:
        """The smallest ordinary case, preferably with all axes above 1, so that its inputs are typical."""
        cases = [one for one in self.op.planned(self.definition, sizes=SIZES[:2], seed=0) if one.size in SIZES]
        if not cases:
            raise Unemittable("there is no ordinary case")
        large = [case for case in cases if min(case.axes.values(), default=2) > 1]
        return min(large or cases, key=lambda case: self.op.memory(self.definition, case))

    @cached_property
    def _drawn(self) -> Values:
        """Inputs that the op draws; scaled down if they would be large."""

        def size_of(definition: Definition) -> int:  # bytes
            specs = definition.inputs.values()
            shapes = ((spec, definition.shape_of(spec, case.axes) or ()) for spec in specs)
            return sum(math.prod(shape) * spec.dtype.bits // 8 for spec, shape in shapes)

        definition, case = self.definition, self._case
        if size_of(definition) > LARGE:
            changed = definition.as_json()
            for axis, size in self.op.smaller(definition, ()).items():
                changed["axes"][axis]["value"] = size
            definition = Definition.model_validate(changed)
        if size_of(definition) > LARGEST:
            raise Unemittable("they are too large to look at")
        return make_inputs(self.op, definition, case, device=torch.device("cpu"))

    @cached_property
    def source(self) -> str:
        """Source of the function; of one that skips the test if inputs follow rules that are hard to write."""
        try:
            entries = self._entries()
        except (Unemittable, ValueError, KeyError) as why:
            return NO_INPUTS.format(why=unquoted(str(why)))
        parameters = "".join(f"{name}={default}, " for name, default in self._parameters.items())
        body = ["torch.manual_seed(seed)", *self._lines, "return {", *(f"    {entry}" for entry in entries), "}"]
        return folded(
            f'def generate_random_inputs({parameters}device="cpu", seed=0):\n'
            '    """Random inputs by name, in the definition\'s order."""\n'
            + textwrap.indent("\n".join(body), "    ")
        )

    def _parameter(self, name: str, default: int) -> str:
        """Give the generated function a parameter; returns its name."""
        self._parameters.setdefault(name, default)
        return name

    def _entries(self) -> list[str]:
        """Lines of the returned dict, one per input; lines that compute axes are added to `_lines`."""
        inputs = self.definition.inputs
        for name in (*inputs, *self.definition.axes):
            if not name.isidentifier() or keyword.iskeyword(name):
                raise Unemittable(f"{printable(name)} is no identifier")
        starts = [name for name, s in inputs.items() if role_of(name) is Role.OFFSETS and len(s.shape or ()) == 1]
        named: set[str] = set()  # var axes with a value
        sizes: dict[str, str] = {}  # input of offsets -> variable with the lengths of its parts
        for name in sorted(starts, key=lambda start: not start.startswith("kv")):
            named |= self._parts(name, sizes)
        if "kv_indices" in inputs and "kv_indptr" in inputs and "num_pages" in self.definition.var_axes:
            self._lines.append("num_pages = num_kv_indices + 1")
            named.add("num_pages")
        for axis in self.definition.var_axes:
            if axis not in named:
                self._axis(axis, starts)
        return [f"{literal(name)}: {self._value(name, spec, sizes)}," for name, spec in inputs.items()]

    def _parts(self, name: str, sizes: dict[str, str]) -> set[str]:
        """Write lengths of the parts that an input of offsets delimits; returns var axes that follow from them."""
        kind, axis = name.partition("_")[0], (self.definition.inputs[name].shape or ("",))[0]
        batch, length = self._parameter("batch_size", 4), self._parameter("seq_len", 64)
        lens = counts = f"{kind}_lens"
        drawn = f"torch.randint(1, {length} + 1, ({batch},), device=device)"
        drawn = f"torch.minimum({drawn}, kv_lens)" if "kv_lens" in sizes.values() else drawn
        self._lines.append(f"{lens} = {drawn}")
        if kind == "kv" and "kv_indices" in self.definition.inputs:
            page, counts = self._size("page_size"), "kv_pages"
            self._lines.append(f"kv_pages = (kv_lens + {page} - 1) // {page}")
        sizes |= {name: counts, kind: lens}
        following = {axis} if axis in self.definition.var_axes else set()
        total = last_of(self.definition, name) or self._total(name)
        if total in self.definition.var_axes:
            self._lines.append(f"{total} = int({counts}.sum())")
        return following | ({total, "batch_size"} & set(self.definition.var_axes))

    def _total(self, name: str) -> str:
        """The var axis whose size is the total length of the parts of an input of offsets, in the drawn case."""
        drawn = self._drawn[name]
        assert isinstance(drawn, torch.Tensor)
        axes = [axis for axis, size in self._case.axes.items() if size == int(drawn[-1]) and axis != "num_pages"]
        if len(axes) != 1:
            raise Unemittable(f"which axis {name} cuts is not said")
        return axes[0]

    def _axis(self, axis: str, starts: Sequence[str]) -> None:
        """Write the line that sets a var axis that no input decides: to a parameter or its size in the case."""
        rows = {(spec.shape or ("",))[0] for spec in self.definition.outputs.values()}
        if axis in {"batch_size", "seq_len", "num_pages"}:
            self._parameter(axis, {"batch_size": 4, "seq_len": 64, "num_pages": 16}[axis])
        elif axis in LENGTHS:
            self._lines.append(f"{axis} = {self._parameter('seq_len', 64)}")
        elif axis in rows or (starts and axis == "num_seqs"):
            self._lines.append(f"{axis} = {self._parameter('batch_size', 4)}")
        else:
            self._lines.append(f"{axis} = {self._case.axes[axis]}")

    def _size(self, axis: str) -> str:
        return axis.upper() if axis in self.definition.const_axes else axis

    def _value(self, name: str, spec: TensorSpec, sizes: Mapping[str, str]) -> str:  # noqa: PLR0911 - a kind each
        """The expression that draws an input."""
        drawn = self._drawn[name]
        if not isinstance(drawn, torch.Tensor):
            return literal(drawn)
        axes = [self._size(axis) for axis in spec.shape or ()]
        shape = f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"
        dtype = f"torch.{spec.dtype}"
        if name in sizes:
            return f"torch.nn.functional.pad({sizes[name]}.cumsum(0), (1, 0)).to({dtype})"
        if name == "kv_indices" and "kv_indptr" in sizes:
            return f"torch.randperm(num_pages, device=device)[:num_kv_indices].to({dtype})"
        if name == "kv_last_page_len" and "kv" in sizes:
            return f"((kv_lens - 1) % {self._size('page_size')} + 1).to({dtype})"
        if drawn.dtype in INTEGERS:
            return self._whole(name, drawn, shape, dtype)
        if drawn.dtype is torch.bool:
            return f"torch.rand({shape}, device=device) < 0.5"
        return _floats(drawn, shape, dtype)

    def _whole(self, name: str, drawn: torch.Tensor, shape: str, dtype: str) -> str:
        """An expression for integers within the drawn ones' range. Raises Unemittable: they are dependent."""
        distinct = drawn.numel() > 1 and len(torch.unique(drawn)) == drawn.numel()
        if not drawn.numel() or (distinct and role_of(name) is Role.INDICES) or drawn.dtype is torch.int8:
            raise Unemittable(f"{name} holds no independent numbers")
        low, high, bound = int(drawn.min()), int(drawn.max()), str(int(drawn.max()) + 1)
        pages, page = self._case.axes.get("num_pages", 0), self.definition.const_axes.get("page_size", 0)
        if role_of(name) is Role.INDICES and high < pages * max(page, 1):
            bound = "num_pages" if high < pages else f"num_pages * {self._size('page_size')}"
        return f"torch.randint({low}, {bound}, {shape}, dtype={dtype}, device=device)"


def _floats(drawn: torch.Tensor, shape: str, dtype: str) -> str:
    """An expression for floats like drawn ones: probabilities, uniform, or normal with their deviation."""
    wide = drawn.to(torch.float64)
    low, high = (float(wide.min()), float(wide.max())) if wide.numel() else (-1.0, 1.0)
    plain = drawn.dtype in NORMAL
    options = f"dtype={dtype}, device=device" if plain else "device=device"
    ending = "" if plain else f".to({dtype})"
    if wide.ndim > 1 and low >= 0 and torch.allclose(wide.sum(-1), torch.ones((), dtype=torch.float64), atol=1e-2):
        return f"torch.softmax(torch.randn({shape}, device=device), -1).to({dtype})"
    if low >= 0 and wide.numel() > 1:
        return f"torch.empty({shape}, {options}).uniform_({low:.3g}, {max(high, low):.3g}){ending}"
    # For a normal sample, even with outliers: half of it is within 0.6745 standard deviations.
    spread = float(wide.abs().median()) / 0.6745 if wide.numel() >= FEW else 1.0
    scale = f" * {spread:.2g}" if 0 < spread < 0.9 and not is_random(drawn) else ""
    text = f"torch.randn({shape}, {options})"
    return f"({text}{scale}){ending}" if scale and ending else f"{text}{scale}{ending}"


def is_random(value: torch.Tensor) -> bool:
    """Whether a tensor looks like flashinfer-bench's random inputs: at least FEW standard normal floats."""
    if value.dtype not in NORMAL or value.numel() < FEW:
        return False
    sample = value.flatten()[: 1 << 16].double()
    off = SIGMAS / math.sqrt(len(sample))
    mean, spread = float(sample.mean()), float(sample.std())
    # Fourth powers have mean 3 and variance 96, which shows uniform samples and outliers.
    peaks = float((sample**4).mean())
    return abs(mean) < off and abs(spread - 1) < off and abs(peaks - 3) < off * math.sqrt(96)
