"""Plants kernels of known precision and counts how often `traceproof.judge.precision` names it.

    PYTHONPATH=src:lab python lab/forensics.py --seeds 20 [--json FILE]

Matrix products and norms over float32, with inputs rounded to one of five formats, sums in one of three, results
in bfloat16, or all as asked; sums from the front, from the back, in blocks and in pairs; outputs in float32 and
bfloat16. An answer counts as right if it names the stage and the format.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from traceproof.judge.precision import ASKED, FORMATS, TF32, Seen, examine, rounded

Tensors = Mapping[str, torch.Tensor]
ROWS, COLUMNS, INNER = 24, 48, 128
ACCUMULATORS = ("bfloat16", "float16", TF32)
ORDERS = ("front", "back", "blocks", "pairs")


@dataclass(frozen=True)
class Plant:
    """A kernel of known precision: what is rounded, to what, and the order of its sums."""

    kind: str
    stage: str
    format: str
    order: str
    out: torch.dtype

    @property
    def truth(self) -> str:
        """What should be said of it."""
        return ASKED if self.stage == ASKED else f"{self.stage} rounded to {self.format}"


def total(terms: torch.Tensor, plant: Plant) -> torch.Tensor:
    """Sums of float32 terms over the last axis, rounded after each step where the plant's sums are."""
    name = plant.format if plant.stage == "sums" else ""

    def keep(value: torch.Tensor) -> torch.Tensor:
        return rounded(value, name) if name else value

    if plant.order == "back":
        terms = terms.flip(-1)
    if plant.order == "pairs":
        parts = keep(terms)
        while parts.shape[-1] > 1:
            parts = keep(parts[..., ::2] + parts[..., 1::2])
        return parts[..., 0]
    step = 16 if plant.order == "blocks" else 1
    found = torch.zeros(terms.shape[:-1])
    for start in range(0, terms.shape[-1], step):
        found = keep(found + terms[..., start : start + step].sum(-1))
    return found


def kernel(plant: Plant, inputs: Tensors) -> torch.Tensor:
    """What a planted kernel gives."""
    given = dict(inputs)
    if plant.stage == "inputs":
        given = {name: rounded(value, plant.format) for name, value in inputs.items()}
    if plant.kind == "product":
        result = total(given["A"][:, None, :] * given["B"][None, :, :], plant)
    else:
        x = given["A"]
        scale = torch.rsqrt(total(x * x, plant) / INNER + 1e-5)
        result = x * scale[:, None] * given["B"]
    return (rounded(result, plant.format) if plant.stage == "result" else result).to(plant.out)


def exact(kind: str, inputs: Tensors) -> torch.Tensor:
    """The answer in float64."""
    x, y = inputs["A"].double(), inputs["B"].double()
    return x @ y.T if kind == "product" else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * y


def examined(plant: Plant, seed: int) -> Seen | None:
    """What is said of the precision of a planted kernel."""
    return examine(drawn(plant.kind, seed), ("A",), partial(kernel, plant), partial(exact, plant.kind))


def plants() -> Iterator[Plant]:
    """Every kind, stage, format, order and output dtype."""
    for kind in ("product", "norm"):
        for out in (torch.float32, torch.bfloat16):
            for order in ORDERS:
                yield Plant(kind, ASKED, "", order, out)
                for name in FORMATS:
                    yield Plant(kind, "inputs", name, order, out)
                for name in ACCUMULATORS:
                    yield Plant(kind, "sums", name, order, out)
                if out == torch.float32:
                    yield Plant(kind, "result", "bfloat16", order, out)


def drawn(kind: str, seed: int) -> dict[str, torch.Tensor]:
    """Normal float32 inputs."""
    generator = torch.Generator().manual_seed(seed)
    shape = (COLUMNS, INNER) if kind == "product" else (INNER,)
    rows = ROWS if kind == "product" else 4 * ROWS
    return {"A": torch.randn(rows, INNER, generator=generator), "B": torch.randn(*shape, generator=generator)}


def main() -> int:
    """Exit code 0: at least 99 % are named rightly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="sets of inputs per plant")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--json", type=Path, help="write the counts here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    right: Counter[tuple[str, str, str]] = Counter()
    runs: Counter[tuple[str, str, str]] = Counter()
    wrong: Counter[str] = Counter()
    for plant in plants():
        for seed in range(options.first, options.first + options.seeds):
            found = examined(plant, seed)
            key = (plant.kind, str(plant.out).removeprefix("torch."), plant.truth)
            runs[key] += 1
            right[key] += str(found) == plant.truth
            if str(found) != plant.truth:
                wrong[f"{' '.join(key)} ({plant.order}): {found}, {found.evidence if found else ''}"[:150]] += 1
    sys.stdout.write("| kernel | output | planted | runs | right |\n|---|---|---|---:|---:|\n")
    for key in runs:
        sys.stdout.write(f"| {' | '.join(key)} | {runs[key]} | {right[key]} |\n")
    share = sum(right.values()) / sum(runs.values())
    sys.stdout.write(f"\n{sum(right.values())} of {sum(runs.values())} right, {share:.2%}\n")
    for text, count in wrong.most_common(20):
        sys.stdout.write(f"{count} x {text}\n")
    if options.json is not None:
        value = {" | ".join(key): [right[key], runs[key]] for key in runs}
        options.json.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    return int(share < 0.99)


if __name__ == "__main__":
    sys.exit(main())
