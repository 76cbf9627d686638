"""sampling: draw a token from a row of probabilities after a top-k filter, a top-p filter, or both."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops import far
from traceproof.ops.base import TORCH_DTYPES, Op, Tensors, Unsupported, Values, ordered
from traceproof.ops.cases import STRESS, Case, Further
from traceproof.ops.compare import Comparison, Samples
from traceproof.ops.far import Far
from traceproof.ops.sampling.distributions import Distributions, source
from traceproof.ops.sampling.filters import Support, pack, support
from traceproof.ops.sampling.patterns import DRAWN_ROWS, PACKS, WHOLE_VOCABULARY, further, place_all
from traceproof.ops.sampling.speculative import DRAFT, Speculative

ROWS = {"small": (1, 2), "medium": (4, 16), "large": (32, 64)}
DRAWS = 160  # of a case, over all its rows, at a vocabulary where a draw takes a CPU 4 to 8 ms
WEIGHT_DRAWS = 256  # ... of cases that are to tell temperatures: a power of 1.2 is told in 998 of 1,000 runs
CHEAP_DRAWS = 5 << 18  # ... and that many divided by the vocabulary where it is small: few tokens tell less
MAX_TRIALS = 128
FEW_TRIALS = 4  # where one token alone is right
DENSE_TRIALS = 6  # a full row sorts three times slower than one that is mostly zeros


class Sampling(Op):
    """The filters that apply are told by the inputs; both: top-k first, top-p on what it leaves, renormalised.

    Top-p keeps the shortest prefix of the falling order whose mass exceeds p, the crossing token included. A k
    outside [1, vocabulary) filters nothing; p >= 1 filters nothing, p <= 0 leaves the most probable token.
    """

    op_type = "sampling"

    def of_form(self, definition: Definition) -> Op:
        """Chain speculative sampling is told by its drafts, filters of the whole call by their shapes."""
        if DRAFT in definition.inputs:
            return SPECULATIVE
        return self if source(definition) is None else DISTRIBUTIONS

    def check(self, definition: Definition) -> None:
        """Known: probs [rows, vocabulary], top_k [rows] or top_p [rows] or both; samples [rows]."""
        names = set(definition.inputs)
        if not ({"probs", "top_k"} <= names or {"probs", "top_p"} <= names) or names - {"probs", "top_k", "top_p"}:
            raise Unsupported(f"inputs are {list(definition.inputs)}")
        if list(definition.outputs) != ["samples"]:
            raise Unsupported(f"outputs are {list(definition.outputs)}")
        probs = definition.inputs["probs"].shape or ()
        if len(probs) != 2 or definition.var_axes != probs[:1]:
            raise Unsupported(f"probs is {list(probs)} with var axes {list(definition.var_axes)}")
        for name, spec in {**definition.inputs, **definition.outputs}.items():
            if name != "probs" and spec.shape != probs[:1]:
                raise Unsupported(f"{name} has the shape {spec.shape}, not one value per row")

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Batches of telling rows; ties, one-hot and the like; three rows over the whole vocabulary."""
        rows = (definition.inputs["probs"].shape or ())[0]
        for size in sizes:
            for index, count in enumerate(ROWS[size]):
                name = "single" if count == 1 else "plain" if count < 16 else "weights"
                yield Case(f"{size}-{index}", size, {rows: count}, seed, {"rows": name})
        yield Case("edge-empty", "edge", {rows: 0}, seed, {"rows": "plain"})
        if "top_p" in definition.inputs:
            yield Case("edge-p-zero", "edge", {rows: 2}, seed, {"rows": "nothing"})
        yield Case("adversarial-rows", "adversarial", {rows: len(PACKS["tricky"])}, seed, {"rows": "tricky"})
        yield Case("adversarial-dense", "adversarial", {rows: 3}, seed, {"rows": "dense"})
        yield Case("adversarial-draws", "adversarial", {rows: DRAWN_ROWS}, seed, {"rows": "draws"})

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """Telling rows behind so many that 32 bits do not count their probabilities."""
        enlarged = self.enlarged(definition)
        params = {"rows": "plain", far.SIZE: enlarged.size(definition, far.ROWS)}
        yield Case("stress-far", STRESS, {enlarged.axis: far.ROWS}, seed, params)

    def enlarged(self, definition: Definition) -> Far:
        """The rows; sorting them takes several times their memory."""
        return Far(axis=(definition.inputs["probs"].shape or ())[0], copies=8)

    def trials(self, definition: Definition, case: Case) -> int:
        """About DRAWS draws in all; where temperatures are to be told, more if the vocabulary is small."""
        rows, vocabulary = definition.shape_of(definition.inputs["probs"], case.axes) or (0, 0)
        if rows == 0:
            return 1
        cheap = CHEAP_DRAWS // max(vocabulary, 1)
        draws = DRAWS
        match case.params.get("rows"):
            case "nothing":
                return FEW_TRIALS
            case "weights":
                draws = max(WEIGHT_DRAWS, cheap)
            case "tricky":
                draws = max(DRAWS, cheap)
            case "draws":
                return FEW_TRIALS  # and many further ones
            case "dense":
                draws = max(DENSE_TRIALS * rows, cheap)
        if case.size == "small":
            # these cases are for the wiring; but a filter that drops a quarter of the mass must show in them
            draws = max(draws // 3, min(DRAWS, cheap))
        return max(1, min(MAX_TRIALS, draws // rows))

    def further(self, definition: Definition, case: Case) -> Further | None:
        """As for all samplers."""
        return further(definition, case)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Rows of the case's pack, each pattern's tokens at places of its own."""
        rows, vocabulary = definition.shape_of(definition.inputs["probs"], case.axes) or (0, 0)
        if case.params.get("rows") == "dense":
            probs, filters = _dense(draw, rows, vocabulary)
        else:
            probs = torch.zeros((rows, vocabulary), dtype=torch.float32, device=draw.device)
            placed = place_all(draw, case.params["rows"], probs)
            both = "top_k" in definition.inputs
            filters = [(pattern.k, pattern.p_after_k if both else pattern.p) for pattern in placed]
        ks = [vocabulary if k == WHOLE_VOCABULARY else min(k, vocabulary) for k, _ in filters]
        values: Values = {
            "probs": probs.to(TORCH_DTYPES[definition.inputs["probs"].dtype]),
            "top_k": torch.tensor(ks, device=draw.device),
            "top_p": torch.tensor([p for _, p in filters], dtype=torch.float32, device=draw.device),
        }
        for name in definition.inputs:
            value = values[name]
            assert isinstance(value, torch.Tensor)
            values[name] = value.to(TORCH_DTYPES[definition.inputs[name].dtype])
        return ordered(definition, values)

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """One valid draw, and each row's exact distribution in sparse form: see `Samples`."""
        del definition
        probs, top_k, top_p = inputs["probs"], inputs.get("top_k"), inputs.get("top_p")
        assert isinstance(probs, torch.Tensor)
        ks = top_k.tolist() if isinstance(top_k, torch.Tensor) else [None] * len(probs)
        ps = top_p.tolist() if isinstance(top_p, torch.Tensor) else [None] * len(probs)
        found: list[Support] = [support(row, k, p) for row, k, p in zip(probs, ks, ps, strict=True)]
        return pack(found, probs.device)

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """The distribution, not the sample."""
        del definition
        return {"samples": Samples()}

    def memory(self, definition: Definition, case: Case) -> int:
        """Probabilities and a dozen rows of scratch, 8 bytes a token."""
        rows, vocabulary = definition.shape_of(definition.inputs["probs"], case.axes) or (0, 0)
        return 4 * rows * vocabulary + 12 * 8 * vocabulary


def _dense(draw: Draw, rows: int, vocabulary: int) -> tuple[torch.Tensor, list[tuple[int, float]]]:
    """Every token has mass, a fifth of it on 16 tokens; the filters cut deep, a little, and not at all."""
    weights = draw.integers("weights", (rows, vocabulary), torch.int64, low=1, high=256)
    heavy = min(16, vocabulary)
    slot = vocabulary // heavy
    places = draw.integers("heavy", (rows, heavy), torch.int64, low=0, high=slot)
    places += torch.arange(heavy, device=draw.device) * slot  # distinct: a scatter to equal places is a race
    sizes = (torch.arange(heavy, device=draw.device) + 4) * max(1, vocabulary // 4)
    weights.scatter_(1, places, sizes.expand(rows, heavy))
    probs = weights.to(torch.float64) / weights.sum(-1, keepdim=True).to(torch.float64)
    filters = [(max(1, vocabulary // 4), 0.5), (20, 0.15), (WHOLE_VOCABULARY, 1.0)]
    return probs.to(torch.float32), [filters[row % len(filters)] for row in range(rows)]


SPECULATIVE, DISTRIBUTIONS = Speculative(), Distributions()
OP = Sampling()
