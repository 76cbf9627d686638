"""sampling, chain speculative: keep drafted tokens as far as the target model would have drawn them.

A draft is accepted with the probability min(1, target / draft) of its token. The first one that is not ends the
sequence with a token drawn from what the target has more than the draft; where all are accepted, a token of the
target follows. Places behind the end hold -1.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from traceproof.dataset.definition import Definition
from traceproof.draw import Draw
from traceproof.ops.base import Op, Tensors, Unsupported, Values, ordered, specified, tensor
from traceproof.ops.cases import Case, Further
from traceproof.ops.compare import Comparison, Samples
from traceproof.ops.sampling.patterns import further

DRAFT, IDS, TARGET = "draft_probs", "draft_token_ids", "target_probs"
SHAPES = {"small": ((1, 3), (2, 2)), "medium": ((8, 4), (16, 3)), "large": ((32, 5), (64, 2))}  # rows and drafts
DRAWS, MAX_TRIALS = 1024, 256
# Eighths of six tokens: what the draft says, and two targets, which accept the first four of them by 1/4, 1, 0 and
# 1, and by 3/4, 1, 1 and 0.
DRAFTED = (4, 2, 1, 1, 0, 0)
TARGETS = ((1, 2, 0, 2, 2, 1), (3, 2, 1, 0, 1, 1))
# Which target a position has, and which token was drafted there; each row begins at another one.
POSITIONS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "mixed": ((1, 0), (0, 0), (1, 0), (0, 3), (0, 2), (1, 1)),
    "accepted": ((0, 1), (1, 2), (0, 3)),
    "refused": ((0, 2), (1, 3)),
}


class Speculative(Op):
    """Drafts of a row follow each other; each position has distributions of its own."""

    op_type = "sampling"

    def check(self, definition: Definition) -> None:
        """Known: drafts [rows, drafts], their probabilities, the target's with one more; one output of tokens."""
        if set(definition.inputs) != {DRAFT, IDS, TARGET} or len(definition.outputs) != 1:
            raise Unsupported(f"inputs are {list(definition.inputs)}, outputs {list(definition.outputs)}")
        (rows, drafts), *_ = shapes = self._shapes(definition)
        more, vocabulary = shapes[2][1:2], shapes[2][2:]
        wanted = [(rows, drafts), (rows, drafts, *vocabulary), (rows, *more, *vocabulary), (rows, *more)]
        if shapes != wanted or set(definition.var_axes) != {rows, drafts, *more}:
            raise Unsupported(f"shapes are {shapes} with var axes {list(definition.var_axes)}")
        if definition.const_axes[vocabulary[0]] < len(DRAFTED):
            raise Unsupported(f"a vocabulary of {definition.const_axes[vocabulary[0]]} tokens")

    def _shapes(self, definition: Definition) -> list[tuple[str, ...]]:
        specs = [definition.inputs[name] for name in (IDS, DRAFT, TARGET)]
        found = [spec.shape or () for spec in (*specs, *definition.outputs.values())]
        if [len(shape) for shape in found] != [2, 3, 3, 2]:
            raise Unsupported(f"shapes are {found}")
        return found

    def cases(self, definition: Definition, *, sizes: Sequence[str], seed: int) -> Iterable[Case]:
        """Rows whose drafts are accepted by chance; then all drafts accepted, and all refused."""
        (rows, drafts), _, (_, more, _), _ = self._shapes(definition)

        def case(name: str, size: str, count: int, drafted: int, kind: str) -> Case:
            return Case(name, size, {rows: count, drafts: drafted, more: drafted + 1}, seed, {"drafts": kind})

        for size in sizes:
            for index, (count, drafted) in enumerate(SHAPES[size]):
                yield case(f"{size}-{index}", size, count, drafted, "mixed")
        yield case("edge-one-draft", "edge", 2, 1, "mixed")
        for kind in ("accepted", "refused"):
            yield case(f"adversarial-{kind}", "adversarial", 3, 3, kind)

    def stress(self, definition: Definition, *, seed: int) -> Iterable[Case]:
        """None."""
        del definition, seed
        return ()

    def trials(self, definition: Definition, case: Case) -> int:
        """About DRAWS sequences in all."""
        rows = self._shapes(definition)[0][0]
        return max(1, min(MAX_TRIALS, DRAWS // max(case.axes[rows], 1)))

    def further(self, definition: Definition, case: Case) -> Further | None:
        """As for all samplers."""
        return further(definition, case)

    def inputs(self, definition: Definition, case: Case, draw: Draw) -> Values:
        """Six tokens of each position have all the mass, at places of their own."""
        shapes, dtypes = specified(definition, case, (DRAFT, IDS, TARGET))
        rows, more, vocabulary = shapes[TARGET]
        slot = vocabulary // len(DRAFTED)
        places = draw.integers("places", (rows, more, len(DRAFTED)), torch.int64, low=0, high=slot)
        places += torch.arange(len(DRAFTED), device=draw.device) * slot
        kinds = POSITIONS[case.params["drafts"]]
        chosen = [[kinds[(row + position) % len(kinds)] for position in range(more)] for row in range(rows)]
        weights = torch.tensor([[TARGETS[which] for which, _ in row] for row in chosen], device=draw.device)
        drafted = torch.tensor([[token for _, token in row] for row in chosen], device=draw.device)
        target = torch.zeros(shapes[TARGET], device=draw.device).scatter_(-1, places, weights.float() / 8)
        draft_weights = torch.tensor(DRAFTED, device=draw.device).expand(rows, more - 1, -1).float() / 8
        draft = torch.zeros(shapes[DRAFT], device=draw.device).scatter_(-1, places[:, :-1], draft_weights)
        ids = places.gather(-1, drafted[..., None]).squeeze(-1)[:, :-1]
        values = {DRAFT: draft, IDS: ids, TARGET: target}
        return ordered(definition, {name: value.to(dtypes[name]) for name, value in values.items()})

    def oracle(self, definition: Definition, inputs: Values) -> Tensors:
        """The likeliest sequence, and each row's exact distribution over sequences: see `Samples`."""
        draft, target = (tensor(inputs, name).to(torch.float64) for name in (DRAFT, TARGET))
        ids = tensor(inputs, IDS).tolist()
        found = [_sequences(*row) for row in zip(draft, ids, target, strict=True)]
        width, length = max((len(one) for one in found), default=0), target.shape[1]
        tokens = torch.full((len(found), width, length), -1, dtype=torch.int64, device=target.device)
        probs = torch.zeros((len(found), width), dtype=torch.float64, device=target.device)
        for row, sequences in enumerate(found):
            for place, (chance, sequence) in enumerate(sequences):
                tokens[row, place, : len(sequence)] = torch.tensor(sequence)
                probs[row, place] = chance
        [name] = definition.outputs
        optional = torch.zeros_like(probs, dtype=torch.bool)
        first = tokens[:, 0] if width else tokens.new_zeros((0, length))
        return {name: first, f"{name}@tokens": tokens, f"{name}@probs": probs, f"{name}@optional": optional}

    def comparisons(self, definition: Definition) -> Mapping[str, Comparison]:
        """The distribution, not the sample."""
        return {name: Samples() for name in definition.outputs}


def _sequences(
    draft: torch.Tensor, ids: Sequence[int], target: torch.Tensor
) -> list[tuple[float, tuple[int, ...]]]:
    """What one row may give, each with its probability, the likeliest first."""
    found: list[tuple[float, tuple[int, ...]]] = []
    reached = 1.0
    kept: tuple[int, ...] = ()
    for wanted, said, token in zip(target[:-1], draft, ids, strict=True):
        accepted = min(1.0, float(wanted[token] / said[token])) if said[token] else float(wanted[token] > 0)
        if accepted < 1:
            found += _ended(reached * (1 - accepted), kept, (wanted - said).clamp_min(0))
        reached, kept = reached * accepted, (*kept, int(token))
        if not reached:
            break
    else:
        found += _ended(reached, kept, target[-1])
    return sorted(found, reverse=True)


def _ended(reached: float, kept: tuple[int, ...], weights: torch.Tensor) -> list[tuple[float, tuple[int, ...]]]:
    """Sequences that end with a token drawn by weights."""
    places = weights.nonzero().flatten().tolist()
    shares = (weights[places] / weights.sum()).tolist()
    return [(reached * share, (*kept, place)) for share, place in zip(shares, places, strict=True)]
