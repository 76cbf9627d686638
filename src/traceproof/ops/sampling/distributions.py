"""sampling from probabilities or logits: all of them, those above a part of the largest (min-p), top-k and top-p.

Filters are numbers of the whole call. Rows may be named by `indices`, which is left out.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import Op, Tensors, Unsupported, Value, Values, scalar, specified, tensor
from traceproof.ops.cases import Case, Further
from traceproof.ops.compare import Comparison, Samples
from traceproof.ops.sampling.filters import UNIT, Support, pack, support
from traceproof.ops.sampling.patterns import DRAWN_ROWS, PACKS, further, place_all

FILTERS: tuple[set[str], ...] = (set(), {"min_p"}, {"top_k", "top_p"})
NOTHING = -10_000.0  # as a logit: its exponential is 0
DRAWS, MAX_TRIALS, FEW_TRIALS = 512, 256, 4
ROWS = {"small": (1, 2), "medium": (4, 8), "large": (16, 32)}
# Of a call: whether a filter cuts deep, a little, or nothing.
VALUES: Mapping[str, Mapping[str, float]] = {
    "deep": {"min_p": 0.55, "top_k": 3, "top_p": 0.66},
    "little": {"min_p": 0.11, "top_k": 6, "top_p": 0.97},
    "none": {"min_p": 0.0, "top_k": 1 << 20, "top_p": 1.0},
}


def source(definition: Definition) -> str | None:
    """The input that holds the distributions, where a definition has this form."""
    names = set(definition.inputs)
    found = names & {"probs", "logits"}
    filters = names - found - {"indices"}
    per_call = all(definition.inputs[name].shape is None for name in filters)
    return found.pop() if len(found) == 1 and filters in FILTERS and per_call else None


class Distributions(Op):
    """The filters that apply are told by the inputs; both: top-k first, top-p on what it leaves, renormalised."""

    op_type = "sampling"

    def check(self, definition: Definition) -> None:
        """Known: probs or logits [rows, vocabulary]; samples [rows]; `indices` may be left out."""
        rows, *_ = shape = definition.inputs[str(source(definition))].shape or ("", "")
        indices = definition.inputs.get("indices")
        if len(shape) != 2 or definition.const_axes.get(shape[1], 0) < max(
            len(one.weights) for one in PACKS["plain"]
        ):
            raise Unsupported(f"the distributions are {list(shape)}")
        if list(definition.outputs) != ["samples"] or definition.outputs["samples"].shape != (rows,):
            raise Unsupported(f"outputs are {list(definition.outputs)}")
        if indices is not None and not indices.optional:
            raise Unsupported("indices can not be left out")

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Batches of telling rows, under filters that cut deep, a little, and nothing; ties; one against many."""

        def case(name: str, size: str, count: int, values: str, rows: str) -> Case:
            return Case(
                name, size, dict.fromkeys(definition.var_axes, count), seed, {"values": values, "rows": rows}
            )

        for size in sizes:
            for index, count in enumerate(ROWS[size]):
                yield case(f"{size}-{index}", size, count, ("deep", "little")[index % 2], "plain")
        yield case("edge-no-filter", "edge", 4, "none", "plain")
        yield case("adversarial-weights", "adversarial", len(PACKS["weights"]), "none", "weights")
        yield case("adversarial-rows", "adversarial", len(PACKS["tricky"]), "deep", "tricky")
        yield case("adversarial-draws", "adversarial", DRAWN_ROWS, "none", "draws")

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """None."""
        del definition, seed
        return ()

    def trials(self, definition: Definition, case: Case) -> int:
        """About DRAWS draws in all."""
        rows, _ = definition.shape_of(definition.inputs[str(source(definition))], case.axes) or (1, 0)
        if case.params.get("rows") == "draws":
            return FEW_TRIALS  # and many further ones
        return max(1, min(MAX_TRIALS, DRAWS // max(rows, 1)))

    def further(self, definition: Definition, case: Case) -> Further | None:
        """As for all samplers."""
        return further(definition, case)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Rows of the case's pack, each pattern's tokens at places of its own."""
        name = str(source(definition))
        shapes, dtypes = specified(definition, case, (name,))
        probs = torch.zeros(shapes[name], device=draw.device)
        place_all(draw, case.params["rows"], probs)
        given = probs if name == "probs" else torch.where(probs > 0, probs.log(), NOTHING)
        filters: dict[str, Value] = {**VALUES[case.params["values"]], "indices": None}
        filters["top_k"] = min(int(VALUES[case.params["values"]]["top_k"]), shapes[name][1])
        return {one: given.to(dtypes[name]) if one == name else filters[one] for one in definition.inputs}

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """One valid draw, and each row's exact distribution in sparse form: see `Samples`."""
        name = str(source(definition))
        given = tensor(inputs, name).to(torch.float64)
        probs = given if name == "probs" else torch.softmax(given, -1)
        k = int(scalar(inputs, "top_k")) if "top_k" in inputs else None
        p = scalar(inputs, "top_p") if "top_p" in inputs else None
        least = scalar(inputs, "min_p") if "min_p" in inputs else None
        return pack([support(row, k, p) if least is None else _above(row, least) for row in probs], probs.device)

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """The distribution, not the sample."""
        del definition
        return {"samples": Samples()}


def _above(row: torch.Tensor, least: float) -> Support:
    """The tokens of at least that part of the largest probability; one within rounding of it may stay or go."""
    whole = support(row, None, None)
    bound = float(whole.probs[0]) * least
    kept = whole.probs[whole.probs >= bound * (1 - 8 * UNIT)]
    return Support(whole.tokens[: len(kept)], kept / kept.sum(), kept < bound * (1 + 8 * UNIT))
