"""Op, the class with all that depends on an op_type: forms, cases, inputs, oracle, comparisons, mutants."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from traceproof.dataset.constraints import broken, evaluate, names, parse, text_of
from traceproof.dataset.hints import Role, role_of
from traceproof.lazy import torch
from traceproof.ops import far
from traceproof.ops.adapter import Adapter, Api, Call, Conditions, Outputs, nothing, signature
from traceproof.ops.base import Given, Tensors, Unsupported, Value, Values, dtype_of, ordered, tensor
from traceproof.ops.cases import BOUNDARY_ROWS, EDGE, LOSSLESS_ROWS, SEEN, STRESS, Case, Further, at_boundaries
from traceproof.ops.compare import Backward, Close, Comparison, Entries, Exact, Fitting, IndexSet, Samples
from traceproof.ops.far import Far
from traceproof.ops.formula import NOTHING, DrawInput, Form, Mutant, Size, Variant, Wanted, Wide, to_dtype

if TYPE_CHECKING:
    from traceproof.dataset.constants import Rule
    from traceproof.dataset.definition import Definition, TensorSpec
    from traceproof.draw import Draw
    from traceproof.models.drafts import Extraction
    from traceproof.ops.lossless import Exactly

SIZES: Mapping[str, tuple[int, ...]] = {"small": (1, 2), "medium": (4, 16), "large": (32, 64)}
# Adversarial cases: a tiny scale, where an eps shows; an outlier column; a mean that is not zero.
ADVERSARIAL: Mapping[str, Mapping[str, float]] = {
    "tiny": {"scale": 1e-3},
    "outlier": {"outlier": 300.0},
    "offset": {"offset": 5.0},  # rows of positive numbers
}
# Values that hidden cases put into inputs, and into which inputs; no names: into all of floating point, but
# under SEEN into none.
UNUSUAL: Mapping[str, Sequence[str]] = {"nan": (), "inf": (), "large": (), "small": ()}
LARGE_AND_SMALL: Mapping[str, Sequence[str]] = {"large": (), "small": ()}  # where kernels may differ on NaN
# Kernels may sum in another order than the baseline, or compute exponentials otherwise: hence the factor.
WIDE = Close(factor=16.0, reason="a float32 output is rounded no more than the sums and exponentials before it")
QUERIES = ("q", "q_nope", "q_pe")
WORKING_MEMORY = frozenset({"workspace", "workspace_buffer", "semaphores"})  # names of such inputs
STAND_INS = (0.5, -1.5)  # finite numbers in place of NaN and infinities; outputs that differ depend on them
# Least size of an axis that is scaled down: enough elements that rounding errors add up as they do in a kernel.
SCALED_DOWN_LEAST = 256
Entry = TypeVar("Entry")
BEYOND = 1 << 24  # index of a row, a page or a slot that no input has
TOO_MANY = "more than there are"  # what is wrong with a `top_k` of BEYOND
UNEVEN, UNEVEN_LESS = "no multiple of 16", 8  # what is wrong with an axis of `uneven` with so many entries less
# Invalid integer inputs that `errors` makes, by role: what is wrong, and the in-place change that makes it so.
INVALID: Mapping[Role, tuple[str, Callable[[torch.Tensor], object]]] = {
    Role.OFFSETS: ("a negative length", lambda flat: flat[1:2].sub_(flat[1:2] + 1)),
    Role.LENGTHS: ("a negative length", lambda flat: flat[-1:].fill_(-1)),
    Role.INDICES: ("a place that is not there", lambda flat: flat[-1:].fill_(BEYOND)),
}


class Op:
    """An op_type: its forms with their formula, its cases, its inputs, how its outputs are compared.

    An op looks at a definition's axes, inputs and outputs, never at parts of its name or at its reference.
    Constants that are no input (an eps, a number of groups) are in `definition.constants`, with all that states
    them. A subclass does what the arguments can not: lengths of sequences, inputs that depend on others.

    A key of the tables `scalars`, `draws`, `gates`, `roundings`, `unread` and `lossless` may name several things.
    """

    # scalar inputs that fit tensors' sizes, or that cases of their own change: hidden cases keep them
    sizes_in_numbers: Collection[str] = ()
    # letters of axes that a case's lists of lengths give a size: a const one must have it, one that holds pages or
    # slots (`roomy`) at least it. Cases that ask for another size are left out
    counted: str = ""
    roomy: str = ""
    names: Mapping[str, str] = NOTHING  # declared name -> the definition's name, where they differ

    def __init__(  # noqa: PLR0913 - one op, spelled out
        self,
        op_type: str,
        *forms: Form,  # the forms it knows; a definition has the first that fits
        family: str = "",  # `verify_<family>` and `nox -s test_<family>` cover it
        # What the driver reads, which has no PyTorch.
        # whether its references take the longest, so that the end of a run waits for them: they start first, and
        # more of them run side by side
        slow: bool = False,
        # ground truths that compile something in most cases' calls; they start first
        compiles_late: Sequence[str] = (),
        staged: bool = False,  # its definitions have a tag `stage:<stage>`
        # whether FlashInfer has no call for a definition, although it has some for the op_type
        without_api: Callable[[Definition], bool] = lambda _: False,
        rules: Sequence[Rule] = (),  # where each constant that is no input is stated
        synonyms: Mapping[str, str] = NOTHING,  # by declared name: other names, in one text, that definitions have
        # Inputs and cases.
        # values of scalar inputs, or functions of the sizes of axes by letter
        scalars: Mapping[str, float | str | Size | None] = NOTHING,
        sizes_in_numbers: Collection[str] = (),  # see the class attribute
        # sizes of var axes other than the rows', by letter: a list that cases cycle through, or a function of the
        # sizes of other letters and of const axes by name
        sizes: Mapping[str, Sequence[int] | Size] = NOTHING,
        bounded: str = "",  # letters of axes whose function in `sizes` says nothing of a const size
        roomy: str = "",  # see the class attribute
        # cases in addition to the ordinary ones, by name: `scale`, `offset` or `outlier` of `adversarial_inputs`
        adversarial: Mapping[str, Mapping[str, Any]] = ADVERSARIAL,
        extremes: Mapping[str, Mapping[str, Any]] = NOTHING,  # cases of the size class `stress`, likewise
        adversarial_inputs: Iterable[str] = (),  # inputs that these change; empty: all with two axes or more
        draws: Mapping[str, DrawInput] = NOTHING,  # how inputs that are not normal values are drawn
        absent: Collection[str] = (),  # optional inputs that no case gives
        # changes the drawn tensors, a dict by declared names, as the case's params say
        adjust: Callable[[dict[str, torch.Tensor], Mapping[str, float]], None] = lambda _, __: None,
        where: str = "",  # relations of sizes by letter, or const axis, ";" between them: "h % g == 0; w == 2 * k"
        least_outputs: int = 1,  # how many outputs a definition has at least
        requires: Callable[[Definition], str | None] = lambda _: None,  # what else of a definition is unsupported
        tile: int = 0,  # rows of the case edge-tile, which fill a tile; 0: no such case
        independent_rows: bool = True,  # whether rows (first axis of outputs) do not depend on each other
        coupled: bool = False,  # whether a part of a batch may have other results alone than in the batch
        # what hidden cases put into inputs, where correct kernels agree, and into which inputs; no names: all of
        # floating point. None: where outputs are judged by numbers, UNUSUAL, or LARGE_AND_SMALL if rows depend on
        # each other
        unusual: Mapping[str, Sequence[str]] | None = None,
        # the axis that cases of far addresses enlarge, given the axis of the rows, where these are independent
        far: Callable[[Definition, str], Far] = lambda _, rows: Far(axis=rows),
        # by input, values for which every correct kernel is exact until it rounds the output (`ops.lossless`); a
        # function where they depend on the definition; empty: none are known. All floating-point inputs have some,
        # but for scalars that change nothing
        lossless: Mapping[str, Exactly] | Callable[[Definition], Mapping[str, Exactly]] = NOTHING,
        lossless_sizes: Mapping[str, int] = NOTHING,  # sizes of axes in that case, by letter
        # whether correct kernels are as exact on a GPU, where divisions are approximate and products may be split
        exact_on_gpu: Callable[[Definition], bool] = lambda _: True,
        # whether PyTorch's kernel on a CPU has a fast exponential: not exactly 1 at 0, and of NaN a number
        fast_exponential: bool = False,
        summed: Sequence[str] = (),  # see the method `summed`
        unread: Mapping[str, str] = NOTHING,  # inputs on which no output depends, each with why
        writes: Collection[str] = (),  # inputs that a call writes to without an output that stands for them
        positive: Collection[str] = (),  # more inputs that are never negative, as scales and probabilities are
        # inputs of which one element at an end of a tile decides each row in a case of `boundaries`; by letter,
        # sizes of var axes in that case that are not BOUNDARY_ROWS
        decisive: Sequence[str] = (),
        decisive_sizes: Mapping[str, int] = NOTHING,
        uneven: str = "",  # letters of axes that kernels are compiled for in multiples of 16; see `errors`
        # Comparisons.
        # how outputs are compared, by name, where it is not `Close` (of float32 outputs WIDE)
        gates: Mapping[str, Comparison] = NOTHING,
        wide_gate: Comparison = WIDE,  # how float32 outputs are compared that `gates` does not name
        # by float32 output: the baseline's error as a number of float32 roundings of the oracle's value, or a
        # function of the row's width. A naive computation is often exact there, and correct kernels are not
        roundings: Mapping[str, float | Callable[[int], float]] = NOTHING,
        # by output, the one that it must fit, and the function that says which of its right values do
        follows: Mapping[str, tuple[str, Fitting]] = NOTHING,
        mutants: Sequence[Mutant] = (),  # bugs that a kernel could have
        other_forms: Sequence[Op] = (),  # ops of further forms, tried first, that share only mutants with these
    ) -> None:
        self.op_type, self.forms, self.family, self.rules = op_type, forms, family, rules
        self.slow, self.compiles_late, self.staged, self.without_api = slow, compiles_late, staged, without_api
        scalars = by_name(scalars)
        self.scalars, self.sizes, self.adversarial, self.extremes = scalars, sizes, adversarial, extremes
        self.absent, self.bounded, self.roomy = absent, bounded, roomy or self.roomy
        self.adversarial_inputs, self.unusual_inputs = frozenset(adversarial_inputs), unusual
        self.draws, self.adjust, self.requires, self.where = by_name(draws), adjust, requires, where
        self.least_outputs = least_outputs
        self.tile, self.independent_rows, self.coupled, self.far = tile, independent_rows, coupled, far
        self.lossless: Callable[[Definition], Mapping[str, Exactly]]
        self.lossless = lambda one: by_name(lossless(one) if callable(lossless) else lossless)
        self.lossless_sizes, self.exact_on_gpu = lossless_sizes, exact_on_gpu
        self.fast_exponential = fast_exponential
        self.gates, self.wide_gate, self.roundings = by_name(gates), wide_gate, by_name(roundings)
        self.follows, self.inputs_summed, self.inputs_unread = follows, summed, by_name(unread)
        self.positive, self.writes = positive, writes
        self.mutants, self.other_forms, self.uneven, self.synonyms = mutants, other_forms, uneven, synonyms
        of_axes = (name for name, value in scalars.items() if callable(value))
        self.sizes_in_numbers = {*(sizes_in_numbers or self.sizes_in_numbers), *of_axes}
        self.decisive, self.decisive_sizes = decisive, decisive_sizes
        self.truths: dict[str, list[Adapter]] = {}  # by ground truth: its calls, in order of preference
        self.extraction: Extraction | None = None  # how its calls are found in a model
        self.matched: tuple[Definition, Form] | None = None  # the definition that `form` matched last, its form

    def truth(
        self,
        source: str,
        name: str,
        *apis: str,
        serves: str = "",
        rows: str | None = "",
        **conditions: Unpack[Conditions],
    ) -> Callable[[Call], Call]:
        """Decorator that registers a call of a package as an adapter of the ground truth `source`.

        `name` is shown in messages. `apis` are the API keys that the call uses. `serves` are the inputs and
        outputs of the definitions that it computes (`adapter.signature`), by default the first form's; ` | `
        separates several. `rows` is the input without whose rows it is not called (`Signature.rows`), by default
        the first; None: it is always called.
        """

        def added(call: Call) -> Call:
            for served in (serves or self.forms[0].names).split(" | "):
                first = served.split(maxsplit=1)[0] if rows == "" else rows
                adapter = Adapter(name, signature(served, rows=first), call, apis, **conditions)
                self.truths.setdefault(source, []).append(adapter)
            return call

        return added

    def called(  # noqa: PLR0913 - one call, spelled out
        self,
        function: str,
        serves: str = "",
        *,
        name: str = "",
        more: Callable[[Given], dict[str, Any]] = nothing,
        written: str = "",
        rows: str | None = None,
        **conditions: Unpack[Conditions],
    ) -> None:
        """Register `module:function` of FlashInfer as a ground truth, with a definition's inputs as keywords.

        `more` returns further arguments, which replace inputs of their name; None removes one. It must be a named
        function, since its text is emitted. The outputs are what the function returns, in order, or copies of the
        inputs `written`, to which it writes; the argument `output` if it returns None otherwise.
        """
        key, shown = f"flashinfer.{function}", name or function.replace(":", ".")
        served = [text.partition("->")[2].split() for text in (serves or self.forms[0].names).split(" | ")]

        @self.truth("flashinfer", shown, key, serves=serves, rows=rows, **conditions)
        def _call(api: Api, definition: Definition, inputs: Given) -> Outputs:
            copies = {name: inputs[name].clone() for name in written.split()}
            given = {**inputs, **copies, **more(inputs)}
            arguments = {name: value for name, value in given.items() if value is not None}
            returned = api[key](**arguments)
            if copies or returned is None:
                returned = (*copies.values(),) if copies else arguments.get("output")
            outputs = returned if isinstance(returned, tuple | list) else (returned,)
            ordered = next(names for names in served if definition.outputs.keys() <= {*names})
            return {name: one for name, one in zip(ordered, outputs, strict=False) if name in definition.outputs}

    def of_form(self, definition: Definition) -> Op:
        """This op or the one of `other_forms` whose form a definition has, in the definition's names (`named`)."""
        this = self.named(definition)
        others = [op.named(definition) for op in self.other_forms]
        for op in others:
            with suppress(Unsupported):
                op.form(definition)
                return op
        nearest = (op for op in (this, *others) if op.looks_like(definition))
        return next(nearest, this)  # its `form` says what is lacking

    def looks_like(self, definition: Definition) -> bool:
        """Whether a definition has the names and shapes of one of the forms."""
        with suppress(Unsupported):
            return any(form.misfit(definition) is None for form in self.forms_of(definition))
        return False

    def names_in(self, definition: Definition) -> dict[str, str]:
        """By declared name the definition's, of those in `synonyms` that it has."""
        present = definition.inputs.keys() | definition.outputs.keys()
        return {
            declared: synonym
            for declared, synonyms in self.synonyms.items()
            for synonym in synonyms.split()
            if synonym in present and declared not in present
        }

    def named(self, definition: Definition) -> Op:
        """A copy with the definition's names in forms and tables, where `names_in` has any; else the op."""
        if not (names := self.names_in(definition)):
            return self

        def renamed(declared: Iterable[str]) -> list[str]:
            return [names.get(name, name) for name in declared]

        op = copy(self)
        op.names, op.forms, op.matched = names, tuple(form.named(names) for form in self.forms), None
        op.adversarial_inputs = frozenset(renamed(self.adversarial_inputs))
        op.inputs_summed, op.decisive = renamed(self.inputs_summed), renamed(self.decisive)
        if self.unusual_inputs is not None:
            op.unusual_inputs = {value: renamed(inputs) for value, inputs in self.unusual_inputs.items()}
        op.lossless = lambda one: {names.get(name, name): value for name, value in self.lossless(one).items()}
        follows = ((renamed([name, other]), fit) for name, (other, fit) in self.follows.items())
        op.follows = {name: (other, fit) for (name, other), fit in follows}
        for table in ("scalars", "draws", "gates", "roundings", "inputs_unread"):
            entries = getattr(self, table)
            setattr(op, table, dict(zip(renamed(entries), entries.values(), strict=True)))
        return op

    def _renamed(self, tensors: Tensors) -> Tensors:
        """A formula's tensors, `name` or `name@what`, under the definition's names."""
        parts = {key: key.partition("@") for key in tensors}
        return {self.names.get(name, name) + at + what: tensors[key] for key, (name, at, what) in parts.items()}

    def check(self, definition: Definition) -> None:
        """Check that `oracle` knows this form of the op: one of `forms`, with sizes for its axes.

        Raises Unsupported if it does not; the definition is then judged without an oracle.
        """
        letters = self.form(definition).axes(definition)
        if all(0 in map(definition.const_axes.get, spec.shape or ()) for spec in definition.outputs.values()):
            raise Unsupported("a const size of 0 leaves nothing to compute")
        functions = {letter for letter, size in self.sizes.items() if callable(size)} - {*self.bounded}
        chosen = {letters.get(letter) for letter in {*self.counted, *self.roomy, *functions}}
        fixed = {axis: size for axis, size in definition.const_axes.items() if axis in chosen}
        if fixed and all(
            case.size == EDGE for case in self.planned(definition, sizes=("small", "medium"), seed=0)
        ):
            sizes = ", ".join(f"{axis} {size}" for axis, size in fixed.items())
            raise Unsupported(f"no case has the sizes that are const, {sizes}")

    def forms_of(self, definition: Definition) -> Sequence[Form]:
        """The forms that a definition may have: here `forms`; a subclass may build them from the definition."""
        del definition
        return self.forms

    def form(self, definition: Definition) -> Form:
        """The first form that fits a definition. Raises Unsupported, with the reason, if none does."""
        matched = self.matched  # read once: another thread may replace it
        if matched is not None and matched[0] is definition:
            return matched[1]
        forms = self.forms_of(definition)
        fitting = next((form for form in forms if form.misfit(definition) is None), None)
        if fitting is None:
            nearest = min(forms, key=lambda form: len(form.inputs.keys() ^ definition.inputs.keys()))
            raise Unsupported(nearest.misfit(definition) or "")
        lacking = self._problem_of_sizes(definition, fitting) or self.requires(definition)
        lacking = lacking or self._broken(definition, fitting.axes(definition))
        if len(definition.outputs) < self.least_outputs:
            lacking = f"outputs are {list(definition.outputs)}"
        if lacking is not None:
            raise Unsupported(lacking)
        self.matched = definition, fitting
        return fitting

    def letters(self, definition: Definition) -> dict[str, str]:
        """The definition's axis for each letter of its form."""
        return self.form(definition).axes(definition)

    def fixed(self, definition: Definition) -> dict[str, int]:
        """The sizes of const axes by letter."""
        const = definition.const_axes
        return {letter: const[axis] for letter, axis in self.letters(definition).items() if axis in const}

    def _problem_of_sizes(self, definition: Definition, form: Form) -> str | None:
        """Why the size of an axis is unknown, or contradicts those of others; None: all are known."""
        letters = form.axes(definition)
        sized = {axis for letter, axis in letters.items() if letter in self.sizes} | {self._rows(definition)}
        unsized = [axis for axis in definition.var_axes if axis in letters.values() and axis not in sized]
        const = definition.const_axes
        known = {**const, **{letter: const[axis] for letter, axis in letters.items() if axis in const}}
        for letter, size in self.sizes.items():
            if size == (1,) and letters.get(letter, "") == self._rows(definition):
                return f"{letters[letter]} is var, and known is 1"
            if (callable(size) or size == (1,)) and letter in known and letter not in self.bounded:
                with suppress(KeyError):  # it follows from an axis that is var
                    needed = size(known) if callable(size) else 1
                    if self._misses(letter, needed, known[letter]):
                        return f"{letters[letter]} is {known[letter]}, and {needed} by the other axes"
        return f"the axes {unsized} are var" if unsized else None

    def _broken(self, definition: Definition, letters: Mapping[str, str]) -> str | None:
        """The first relation of `where` that the sizes of const axes break; None: none is."""
        const = definition.const_axes
        sizes = {**const, **{letter: const[axis] for letter, axis in letters.items() if axis in const}}
        for letter, size in self.sizes.items():
            if callable(size) and letter in letters.keys() - sizes:
                with suppress(KeyError):  # it follows from an axis that is var
                    sizes[letter] = size(sizes)
        for relation in filter(None, self.where.split(";")):
            if evaluate(parse(relation), sizes) is False:
                named = re.sub(r"[A-Za-z]\w*", lambda word: letters.get(word[0], word[0]), relation.strip())
                stated = (f"{letters.get(one, one)} is {sizes[one]}" for one in sorted(names(relation)))
                return f"{named} does not hold: {', '.join(stated)}"
        return None

    def _misses(self, letter: str, needed: int, size: int) -> bool:
        """Whether a const axis has not the size that a case needs; one of `roomy` may be larger."""
        return needed > size if letter in self.roomy else needed != size

    @staticmethod
    def rows_of(definition: Definition, case: Case) -> int:
        """The size of the first axis of the first output in a case."""
        return (definition.shape_of(next(iter(definition.outputs.values())), case.axes) or (1,))[0]

    @staticmethod
    def _rows(definition: Definition) -> str | None:
        """The first axis of the first output, if it is var."""
        first = (next(iter(definition.outputs.values())).shape or ("",))[0]
        return first if first in definition.var_axes else None

    def row_axis(self, definition: Definition) -> str | None:
        """The first axis of all outputs, if it is var and its rows are independent; else None."""
        first = {(spec.shape or ("",))[0] for spec in definition.outputs.values()}
        return self._rows(definition) if self.independent_rows and len(first) == 1 else None

    def in_chunks(self, definition: Definition) -> bool:
        """Whether large cases are judged in chunks of rows: these are independent, and judged by their numbers."""
        first = {(spec.shape or ("",))[0] for spec in self.judged(definition).values()}
        numeric = not any(isinstance(kind, Samples | IndexSet) for kind in self.comparisons(definition).values())
        return first == {self.row_axis(definition)} and numeric

    def settled(self, definition: Definition, case: Case) -> Case:
        """The case with the sizes of axes that are functions of other axes (`sizes`), as `case` has them."""
        if not any(callable(size) for size in self.sizes.values()):
            return case
        letters, axes = self.letters(definition), dict(case.axes)
        every = {**definition.const_axes, **axes}
        sizes = {**definition.const_axes, **{letter: every[axis] for letter, axis in letters.items()}}
        for letter, size in self.sizes.items():
            if callable(size) and letter in letters:
                if letters[letter] in axes:
                    axes[letters[letter]] = sizes[letter] = size(sizes)
                elif letter not in self.bounded and self._misses(letter, needed := size(sizes), sizes[letter]):
                    axes[letters[letter]] = needed
        return replace(case, axes=axes)

    def open_axes(self, definition: Definition) -> frozenset[str]:
        """Output axes whose size only the code tells: the definition's open axes without those in `sizes`."""
        letters = self.letters(definition) if self.forms else {}
        return definition.open_axes - {letters[one] for one in self.sizes if one in letters}

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """The cases of `sizes`, and the edge and adversarial ones, in a fixed order.

        The default: SIZES rows, none at all, `tile` rows, and the `adversarial` cases, of 5 rows each.
        """
        rows, letters = self._rows(definition), self.letters(definition)
        sizes_of: dict[str, Sequence[int]] = {}  # by axis other than the rows
        for letter, axis in letters.items():
            size = self.sizes.get(letter)
            if size is not None and axis != rows and axis not in definition.const_axes:
                sizes_of[axis] = (1,) if callable(size) else size  # a function's result is put in by `settled`
        sizes_of |= {axis: (1,) for axis in definition.var_axes if axis not in letters.values()}  # no tensor's

        def case(name: str, count: int, turn: int, params: Mapping[str, Any] = NOTHING) -> Case:
            axes = {} if rows is None else {rows: count}
            axes |= {axis: choices[turn % len(choices)] for axis, choices in sizes_of.items()}
            return self.settled(definition, Case(name, name.partition("-")[0], axes, seed, dict(params)))

        counts = [(f"{size}-{index}", count) for size in sizes for index, count in enumerate(SIZES[size])]
        for turn, (name, count) in enumerate(counts):
            yield case(name, count, turn)
        if rows is not None and broken(definition, {rows: 0}) is None:  # unless a constraint rules it out
            yield case("edge-empty", 0, 0)
        if self.tile:
            yield case("edge-tile", self.tile, 0)
        for turn, (name, params) in enumerate(self.adversarial.items(), 2):
            yield case(f"adversarial-{name}", 5, turn, params)

    def case(
        self,
        definition: Definition,
        name: str,
        sizes: Mapping[str, int],
        seed: int,
        params: Mapping[str, Any] = NOTHING,
    ) -> Case:
        """A case whose name begins with its size class; `sizes` are of axes by letter, other var ones are 1.

        A const axis of another size than the case needs keeps that among the case's axes (`fits`).
        """
        letters, const = self.letters(definition), definition.const_axes
        needed = {letters[one]: (one, size) for one, size in sizes.items() if one in letters}
        axes = {axis: needed.get(axis, ("", 1))[1] for axis in definition.var_axes}
        for axis in needed.keys() & const.keys():
            letter, size = needed[axis]
            if (letter in self.counted + self.roomy or not size) and self._misses(letter, size, const[axis]):
                axes[axis] = size
        return Case(name, name.partition("-")[0], axes, seed, dict(params))

    def fits(self, definition: Definition, case: Case) -> bool:
        """Whether a case needs no other size of a const axis, for kernels neither (`far`)."""
        enlarged = self.enlarged(definition) if far.SIZE in case.params else None
        sizes = {**case.axes, **({} if enlarged is None else {enlarged.axis: case.params[far.SIZE]})}
        return all(definition.const_axes.get(axis, size) == size for axis, size in sizes.items())

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """The cases of size class `stress`, in a fixed order.

        The default: if rows are independent, so many that a tensor has more elements than 32 bits count; and one
        case per entry of `extremes`, with a medium case's sizes.
        """
        enlarged = self.enlarged(definition)
        small = self.cases(definition, sizes=("small",), seed=seed)
        plain = next((case for case in small if not case.params), None)
        if enlarged is not None and plain is not None:
            axes = {**plain.axes, enlarged.axis: far.ROWS}
            yield Case("stress-far", STRESS, axes, seed, {far.SIZE: enlarged.size(definition, far.ROWS, axes)})
        for name, params in self.extremes.items():
            medium = next(iter(self.cases(definition, sizes=("medium",), seed=seed)))
            yield Case(f"stress-{name}", STRESS, medium.axes, seed, dict(params))

    def boundaries(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """Cases, only for kernels, in which one element at the begin or end of a tile decides each row.

        The default: one, if the op has `decisive` inputs, or rows are independent and `adversarial` has outliers.
        The latter not in a subclass: attention's ordinary cases lean to such keys.
        """
        if decisive := [name for name in self.decisive if name in definition.inputs]:
            sizes = {**dict.fromkeys(self.letters(definition), BOUNDARY_ROWS), **self.decisive_sizes}
            plain = self.settled(definition, self.case(definition, "", sizes, seed))
            yield at_boundaries(plain.axes, decisive, seed)
            return
        rows = self.row_axis(definition)
        shapes = {name: spec.shape or () for name, spec in definition.inputs.items()}
        names = [name for name in shapes if self._is_adversarial(name, shapes[name]) and name not in self.draws]
        outliers = any("outlier" in params for params in self.adversarial.values())
        if rows is not None and names and outliers and type(self) is Op:
            plain = next(case for case in self.cases(definition, sizes=("medium",), seed=seed) if not case.params)
            yield at_boundaries({**plain.axes, rows: BOUNDARY_ROWS}, names, seed)

    def enlarged(self, definition: Definition) -> Far | None:
        """The axis that cases of far addresses enlarge; None: there is none. The default: rows, by `far`."""
        rows = self.row_axis(definition)
        return None if rows is None else self.far(definition, rows)

    def planned(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterator[Case]:
        """All cases of the given size classes that fit, `stress` included, with the edge and adversarial cases."""
        every = [*self.cases(definition, sizes=[size for size in sizes if size != STRESS], seed=seed)]
        every += self.stress(definition, seed=seed) if STRESS in sizes else ()
        yield from (case for case in every if self.fits(definition, case))

    def of_size(self, definition: Definition, case: Case, count: int, *, long: bool) -> Case:
        """A case like this one with `count` rows, tokens or sequences; `long`: one sequence of `count` tokens.

        The default adds one number to all var axes, so that an axis that must not be smaller than another stays
        so; with `long` not to independent rows, if there are other axes. A case whose params have a list, e.g. of
        lengths, is returned unchanged.
        """
        if any(isinstance(value, list | tuple) for value in case.params.values()):
            return case
        letters = self.letters(definition) if self.forms else {}
        rows = self.row_axis(definition)
        derived = {letters[one] for one, size in self.sizes.items() if callable(size) and one in letters} - {rows}
        single = self.single(definition) if self.forms else frozenset()
        keeps_rows = long and len(case.axes.keys() - derived - single) > 1
        growing = [axis for axis in case.axes if axis not in single and not (keeps_rows and axis == rows)]
        more = max(0, count - min((case.axes[axis] for axis in growing), default=0))
        axes = {**case.axes, **{axis: case.axes[axis] + more for axis in growing}}
        return self.settled(definition, replace(case, axes=axes))

    def at_once(self, definition: Definition, *, long: bool) -> bool:
        """Whether Python references compute many rows, or one long sequence, in few calls of PyTorch.

        The default: if rows are independent, or no output has a var axis.
        """
        del long
        axes = {axis for spec in definition.outputs.values() for axis in spec.shape or ()}
        return self.row_axis(definition) is not None or axes.isdisjoint(definition.var_axes)

    def _is_adversarial(self, name: str, shape: Sequence[object]) -> bool:
        """Whether adversarial cases change an input."""
        return name in self.adversarial_inputs if self.adversarial_inputs else len(shape) > 1

    def unusual(self, definition: Definition) -> Mapping[str, Sequence[str]]:
        """Values that hidden cases put into inputs (`run.case.put_unusual`), each with the inputs' names."""
        kinds = self.comparisons(definition).values()
        numeric = all(isinstance(kind, Close | Backward | Exact) for kind in kinds)
        exact = [kind for kind in kinds if isinstance(kind, Exact)]  # NaN may have other bits
        usual = LARGE_AND_SMALL if exact or self.row_axis(definition) is None else UNUSUAL
        if self.row_axis(definition) is None and any(kind.order for kind in exact):
            usual = {"large": ()}  # beside the whole tensor's scale all codes of small rows are 0
        declared = (usual if numeric else {}) if self.unusual_inputs is None else self.unusual_inputs
        floats = floats_of(definition)
        inputs = {
            value: [name for name in floats if not names or name in names]
            for value, names in declared.items()
            if value != SEEN
        }
        return {value: names for value, names in inputs.items() if names}

    def seen(self, definition: Definition) -> Sequence[str]:
        """The inputs whose NaN and infinities every correct kernel shows in what depends on them.

        Those that `unusual` names under SEEN, else all of floating point, if outputs are judged by their numbers;
        without queries, and without inputs that the call writes to.
        """
        kinds = self.comparisons(definition).values()
        codes = any(isinstance(kind, Exact) and kind.order is not None for kind in kinds)
        numeric = all(isinstance(kind, Close | Backward | Exact) for kind in kinds) and not codes
        floats = floats_of(definition)
        names = (self.unusual_inputs or {}).get(SEEN, floats if numeric and self.unusual_inputs != {} else ())
        # PyTorch's own attention hides NaN of queries with few keys; an op with a state is no softmax attention.
        quiet = () if any("state" in name for name in definition.inputs) else QUERIES
        return [name for name in floats if name in names and name not in {*quiet, *self.judged(definition)}]

    def lossless_case(self, definition: Definition, base: Case) -> Case:
        """The case whose values make sums exact: `base` with LOSSLESS_ROWS rows, axes of `lossless_sizes`."""
        case = self.of_size(definition, base, LOSSLESS_ROWS, long=False)
        letters = self.letters(definition)
        sizes = {letters[one]: size for one, size in self.lossless_sizes.items() if letters.get(one) in case.axes}
        return self.settled(definition, replace(case, axes={**case.axes, **sizes}))

    def errors(self, definition: Definition, inputs: Values) -> Iterator[tuple[str, Values]]:
        """Yield (what is wrong, inputs) for invalid inputs, on which a kernel must raise or be correct.

        The first tensor of 16-bit floats in another dtype; each float tensor with its last axis one short; integer
        inputs with a negative length or a row, page or slot that does not exist, by role (INVALID); a `top_k`
        beyond all candidates; and axes of `uneven` cut to no multiple of 16, in all inputs that have them.
        """
        tensors = {name: one for name in definition.inputs if isinstance(one := inputs[name], torch.Tensor)}
        yield from _another_dtype(tensors, inputs)
        for name, one in tensors.items():
            if one.dim() and one.shape[-1] > 1 and one.is_floating_point():
                yield f"the last axis of {name} one short", {**inputs, name: one[..., :-1].contiguous()}
        letters = self.letters(definition) if self.uneven else {}
        for axis in dict.fromkeys(letters[letter] for letter in self.uneven if letter in letters):
            size = definition.const_axes.get(axis, 0) - UNEVEN_LESS
            if size > 0:
                shapes = {name: definition.inputs[name].shape or () for name in tensors}
                cut = {
                    name: tensors[name].narrow(shape.index(axis), 0, size).contiguous()
                    for name, shape in shapes.items()
                    if axis in shape
                }
                yield f"{axis} of {size} in {', '.join(cut)}, {UNEVEN}", {**inputs, **cut}
        yield from _invalid_integers(tensors, inputs)

    def no_inputs(self, definition: Definition) -> str | None:
        """Why no inputs can be drawn for a definition, whatever the case; None: they can."""
        del definition
        return None

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """The definition's inputs in its order: tensors on `draw.device`, Python scalars, or None if optional."""
        values = {name: self.value(definition, name, spec, case, draw) for name, spec in definition.inputs.items()}
        declared = {name: in_form for in_form, name in self.names.items()}
        tensors = {declared.get(name, name): one for name, one in values.items() if isinstance(one, torch.Tensor)}
        self.adjust(tensors, case.params)
        return ordered(definition, values | self._renamed(tensors))

    def value(self, definition: Definition, name: str, spec: TensorSpec, case: Case, draw: Draw) -> Value:
        """Draw an input: a scalar, what `draws` gives, or normal values with the case's scale or outlier."""
        if spec.optional and name in self.absent:
            return None
        shape = definition.shape_of(spec, case.axes)
        if shape is None:
            sizes = {**definition.const_axes, **case.axes}  # a scalar of an axis' name is its size
            # a text is a mode of the call, passed unchanged
            stated: Any = text_of(definition, name) if spec.dtype == "string" else 1.0
            stated = self.scalars.get(name, stated)
            if callable(stated):
                stated = stated({letter: sizes[axis] for letter, axis in self.letters(definition).items()})
            number: Value = sizes.get(name, stated)
            return int(number) if isinstance(number, bool) and spec.dtype != "bool" else number
        dtype = dtype_of(spec)
        if name in self.draws:
            drawn = self.draws[name](draw, Wanted(definition, case, name, shape, dtype, self.names))
            if drawn is not None:
                return drawn
        params = case.params if self._is_adversarial(name, shape) else {}
        narrow = dtype not in {torch.float32, torch.float16, torch.bfloat16}
        scale = float(params.get("scale", 1.0))
        values = draw.normal(name, shape, torch.float32 if narrow else dtype, scale=scale)
        if "offset" in params:
            values += float(params["offset"])
        if "outlier" in params:
            values[..., shape[-1] // 3] = float(params["outlier"])
        return values.to(dtype)

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """The outputs in float64 (integers stay integers), written independently of any reference.

        Entries named `<output>@<what>` hold what a comparison needs in addition to the value (`ops.compare`).
        """
        return self._computed(definition, inputs, torch.float64, extras=True)

    def baseline(self, definition: Definition, inputs: Values) -> Tensors:
        """The formula in float32, rounded once to the output's dtype; only for outputs compared by `Close`.

        An output in `roundings` is the oracle's value with a relative error of that many float32 roundings
        (2**-24).
        """
        kinds = self.comparisons(definition)
        if not any(isinstance(kind, Close) for kind in kinds.values()):
            return {}
        low, specs = self._computed(definition, inputs, torch.float32, extras=False), self.judged(definition)
        of_oracle = [name for name in self.roundings if name in low and specs[name].dtype == "float32"]
        exact = self.oracle(definition, inputs) if of_oracle else {}
        for name in of_oracle:
            count = self.roundings[name]
            units = count if isinstance(count, int | float) else count(low[name].shape[-1])
            low[name] = exact[name] * (1 + units * 2.0**-24)
        return {
            name: to_dtype(low[name], dtype_of(spec))
            for name, spec in specs.items()
            if isinstance(kinds[name], Close) and (name in low or not spec.optional)
        }

    def _computed(self, definition: Definition, inputs: Values, dtype: torch.dtype, *, extras: bool) -> Tensors:
        found = self._renamed(self.form(definition).formula(Wide(definition, inputs, dtype, self.names)))
        judged = self.judged(definition)
        return {
            name: value
            for name, value in found.items()
            if name in judged or (extras and name.partition("@")[0] in judged)
        }

    def expected(self, definition: Definition, inputs: Values, nonfinite: Collection[str] = ()) -> Tensors:
        """The oracle's entries by output, and the baselines as `<output>@baseline`.

        With `nonfinite`, the inputs that hold NaN or infinities, `<output>@seen` is a bool mask of the elements in
        which every right kernel shows them.
        """
        baselines = self.baseline(definition, inputs)
        entries = self.oracle(definition, inputs)
        entries |= {f"{name}@baseline": value for name, value in baselines.items()}
        if nonfinite:
            shown = self._shown(definition, inputs, nonfinite, entries)
            entries |= {f"{name}@seen": mask for name, mask in shown.items()}
        return entries

    def _shown(
        self, definition: Definition, inputs: Values, nonfinite: Collection[str], entries: Tensors
    ) -> Tensors:
        """By output, a bool mask of the elements in which every right kernel shows NaN or infinities of inputs.

        A kernel may skip a product with zero, in which the oracle shows NaN. So an element counts only if it
        depends on the places that hold NaN or infinities of exactly one input (it changes with the finite number
        put there), and the oracle of that input alone as it is, the others being finite, is not finite there.
        """
        stand_in, other = ({name: finite(inputs[name], number) for name in nonfinite} for number in STAND_INS)

        def oracle(**one: Value) -> Tensors:
            return self.oracle(definition, {**inputs, **stand_in, **one})

        all_finite = oracle()
        changed = [oracle(**{name: other[name]}) for name in nonfinite]
        # `entries` are the oracle's: those of a single input, too
        alone = [oracle(**{name: inputs[name]}) if len(nonfinite) > 1 else entries for name in nonfinite]
        shown = {}
        for name in definition.outputs.keys() & all_finite.keys():
            depends = torch.stack([all_finite[name] != one[name] for one in changed])
            shows = torch.stack([~one[name].isfinite() for one in alone])
            shown[name] = (depends & shows).any(0) & (depends.sum(0) == 1)
        return shown

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """The comparison of each output: that of `gates`, else `wide_gate` if float32, else `Close()`."""
        return {
            name: self.gates.get(name, self.wide_gate if spec.dtype == "float32" else Close())
            for name, spec in self.judged(definition).items()
        }

    def fitting(self, definition: Definition, name: str, oracle: Mapping[str, Entries], made: Entries) -> Entries:
        """The oracle's entries for an output that fit what an implementation `made` of the one that it follows.

        All of them, if it made nothing of it in the right shape and dtype. `oracle` has entries by output.
        """
        other, fit = self.follows.get(name, ("", None))
        if fit is None or other not in made or "" not in oracle[other]:
            return oracle[name]
        dtype = dtype_of(self.judged(definition)[other])
        fits = made[other].shape == oracle[other][""].shape and made[other].dtype is dtype
        return fit(made[other], oracle[other], oracle[name]) if fits else oracle[name]

    def varied(self, variant: Variant, subject: Subject) -> Tensors | None:
        """Outputs of the formula with the variant's parameters, rounded once; None: it does not apply."""
        definition = subject.definition
        wide = Wide(definition, subject.inputs, getattr(torch, variant.precision), self.names)
        if not variant.applies(wide):
            return None
        formula = variant.formula or self.form(definition).formula
        found = formula(wide.changed(**variant.inputs(wide)), **variant.changes)
        found = self._renamed(found | variant.outputs(wide, found))
        return {
            name: to_dtype(found[name], dtype_of(spec))
            for name, spec in self.judged(definition).items()
            if name in found or not spec.optional
        }

    def memory(self, definition: Definition, case: Case) -> int:
        """Estimated peak in bytes of running the reference or the oracle once, inputs included.

        The default: all inputs and outputs once as stored and twice in float64.
        """
        return sum(
            math.prod(definition.shape_of(spec, case.axes) or ()) * (spec.dtype.bits + 128) // 8
            for spec in (*definition.inputs.values(), *definition.outputs.values())
        )

    def reference_excess(self, definition: Definition) -> int:
        """Estimated bytes by which the reference's peak exceeds the oracle's. The default: none."""
        del definition
        return 0

    def smaller(self, definition: Definition, fixed: Collection[str]) -> Mapping[str, int]:
        """Sizes of const axes in a smaller definition that means the same (`ops.scaled_down`); empty: none.

        The default divides all large axes of tensors but `fixed` ones by one power of two, so that their ratios
        stay.
        """
        specs = (*definition.inputs.values(), *definition.outputs.values())
        used = {axis for spec in specs for axis in spec.shape or ()}
        axes = {name: size for name, size in definition.const_axes.items() if name in used and name not in fixed}
        return scaled_down({name: size for name, size in axes.items() if size >= 2 * SCALED_DOWN_LEAST})

    def scaled_down_cases(self, definition: Definition) -> Collection[str]:
        """Ids of cases that references are judged by in a smaller definition, too. The default: none."""
        del definition
        return ()

    def trials(self, definition: Definition, case: Case) -> int:
        """How often an implementation runs the case, stacked along a new first axis; 0: once, no such axis."""
        del definition, case
        return 0

    def further(self, definition: Definition, case: Case) -> Further | None:
        """How a sampler draws on after its trials, in calls with repeated rows; None: it does not."""
        del definition, case
        return None

    def tells_apart(self, definition: Definition, one: Values, other: Values) -> bool:
        """Whether the oracle's outputs for two sets of inputs differ: few candidates may leave only one choice.

        True where the oracle can not say.
        """
        try:
            self.check(definition)
        except Unsupported:
            return True
        first, second = self.oracle(definition, one), self.oracle(definition, other)
        outputs = first.keys() & definition.outputs.keys()
        for name, kind in self.comparisons(definition).items():
            if isinstance(kind, IndexSet) and name in outputs:
                first[name], second[name] = first[name].sort(-1).values, second[name].sort(-1).values
        return not outputs or any(not torch.equal(first[name], second[name]) for name in outputs)

    def summed(self, definition: Definition) -> tuple[str, ...]:
        """Inputs over whose last axis the op sums: zeros in all of them add nothing (`judge.precision`)."""
        return tuple(name for name in self.inputs_summed if name in definition.inputs)

    def unread(self, definition: Definition) -> Mapping[str, str]:
        """Inputs on which no output depends, each with why."""
        return {name: why for name, why in self.inputs_unread.items() if name in definition.inputs}

    def single(self, definition: Definition) -> frozenset[str]:
        """Var axes that always have one entry. The default: those whose only size in `sizes` is 1."""
        letters = self.letters(definition)
        return frozenset(letters[one] for one, size in self.sizes.items() if size == (1,) and one in letters)

    def mutated(self, definition: Definition) -> frozenset[str]:
        """Inputs that a call writes to. The default: those that an output is written to, and `writes`."""
        return definition.in_place | ({*self.writes} & definition.inputs.keys())

    def writable(self, definition: Definition) -> frozenset[str]:
        """Inputs that a call may write to: those of `mutated`, and memory to work in, which nobody judges."""
        return self.mutated(definition) | (WORKING_MEMORY & definition.inputs.keys())

    def judged(self, definition: Definition) -> dict[str, TensorSpec]:
        """Specs of all that is judged: outputs, then inputs that a call writes to without an output for them."""
        written = sorted(self.mutated(definition) - definition.in_place)
        return {**definition.outputs, **{name: definition.inputs[name] for name in written}}


def by_name(table: Mapping[str, Entry]) -> dict[str, Entry]:
    """A table with a key for each of the names that a key of `table` lists."""
    return {name: value for names, value in table.items() for name in names.split()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One case with its drawn inputs and the oracle's results."""

    definition: Definition
    op: Op
    case: Case
    inputs: Values
    oracle: Tensors  # the oracle's entries and baselines, as `output` or `output@what`; empty: there is no oracle
    seed: int  # of this round; variants that need random numbers start from it

    @property
    def trials(self) -> int:
        """How often a sampling op is run; 0: it is no such op."""
        return self.op.trials(self.definition, self.case)

    def tensor(self, name: str) -> torch.Tensor:
        """An input that is a tensor."""
        return tensor(self.inputs, name)

    def with_inputs(self, **changes: Value) -> Values:
        """The inputs with some replaced."""
        return {**self.inputs, **changes}


def floats_of(definition: Definition) -> list[str]:
    """Names of the float32, float16 and bfloat16 tensor inputs, which can hold NaN and infinities."""
    plain = {"float32", "float16", "bfloat16"}
    return [name for name, spec in definition.inputs.items() if spec.shape is not None and spec.dtype in plain]


def _another_dtype(tensors: Tensors, inputs: Values) -> Iterator[tuple[str, Values]]:
    """Invalid inputs for `errors`: the first tensor of 16-bit floats in another dtype."""
    other = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}
    name = next((name for name, one in tensors.items() if one.dtype in other), None)
    if name is not None:
        for dtype in (torch.float32, other[tensors[name].dtype]):
            yield f"{name} in {str(dtype).removeprefix('torch.')}", {**inputs, name: tensors[name].to(dtype)}


def _invalid_integers(tensors: Tensors, inputs: Values) -> Iterator[tuple[str, Values]]:
    """Invalid inputs for `errors`: an integer tensor with a value that its role rules out, or a large `top_k`."""
    for name, one in tensors.items():
        invalid = INVALID.get(role_of(name)) if one.dtype in {torch.int32, torch.int64} else None
        if name == "top_k":
            invalid = TOO_MANY, lambda flat: flat.fill_(BEYOND)
        if invalid is not None and one.numel() > 1:
            what, change = invalid
            changed = one.clone()
            change(changed.view(-1))
            yield f"{what} in {name}", {**inputs, name: changed}


def finite(value: Value, number: float) -> Value:
    """A tensor with `number` in place of NaN and infinities; any other value unchanged."""
    return torch.where(value.isfinite(), value, number) if isinstance(value, torch.Tensor) else value


def scaled_down(sizes: Mapping[str, int]) -> dict[str, int]:
    """All sizes divided by the largest power of two that leaves whole numbers of at least SCALED_DOWN_LEAST."""
    factor = 1
    while sizes and all(
        size % (2 * factor) == 0 and size // (2 * factor) >= SCALED_DOWN_LEAST for size in sizes.values()
    ):
        factor *= 2
    return {name: size // factor for name, size in sizes.items()}
