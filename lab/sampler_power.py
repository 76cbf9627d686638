"""What the judge sees of samplers that are a little wrong, by who draws and by the size of the vocabulary.

    python lab/sampler_power.py --device cuda --runs 20 --right 500

Who draws: the reference on a CPU, the reference on the GPU, and kernels that draw in batches, each as often as the
case for many draws lets it, by its own time. Those draws are made once, by the real code, and judged. Then as many
are made from the exact distributions with a mistake in them, `--runs` times; the share that is refused is printed.
Kernels with planted mistakes (FlashInfer's with a mistake around it, where that is installed, and a table of
cumulative probabilities) are run once each. `--right` runs of right samplers are divided among all rows. The exit
code is 1 if a right sampler was refused, or a planted one was not.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.judge.sampling import judge_samples
from traceproof.ops import registry
from traceproof.ops.base import tensor
from traceproof.ops.compare import Samples
from traceproof.run.calls import further_draws
from traceproof.run.case import make_inputs

say = partial(print, flush=True)  # a line, at once

ROOT = Path(__file__).resolve().parent.parent
CASE, NAME = "adversarial-draws", "top_k_sampling_from_probs_v1000"
NONE = -2  # in the place of any token outside the support
COPIES = 8  # rows after which a row comes again
PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--vocabulary", type=int, nargs="+", default=[1000, 32000, 128256, 152064])
PARSER.add_argument("--runs", type=int, default=20, help="of each mistake, by its exact distribution")
PARSER.add_argument("--right", type=int, default=500, help="runs of right samplers, over all rows of the table")
PARSER.add_argument("--device", default="cpu", help="cpu or cuda; with cuda, references run on the CPU too")
PARSER.add_argument("--seconds", type=float, help="in place of the case's own for one sampler")

Draw = Callable[[Sequence[Any]], list[tuple[str | None, Any]]]


@dataclass(frozen=True, slots=True)
class Known:
    """The case for many draws of a definition, drawn and solved on a device."""

    definition: Definition
    order: dict[str, Any]
    inputs: dict[str, torch.Tensor]
    oracle: Mapping[str, torch.Tensor]
    device: torch.device

    @classmethod
    def of(cls, vocabulary: int, device: torch.device, seconds: float | None) -> Known:
        """That of top-k at a vocabulary."""
        entry = read_tree(ROOT / "tests" / "dataset").definitions[NAME]
        changed = entry.definition.as_json()
        changed["axes"]["vocab_size"]["value"] = vocabulary
        definition = Definition.model_validate(changed)
        op = registry.get(definition.op_type).of_form(definition)
        case = next(it for it in op.cases(definition, sizes=[], seed=0) if it.id == CASE)
        inputs = make_inputs(op, definition, case, device=torch.device("cpu"))
        given = {name: tensor(inputs, name).to(device) for name in inputs}
        found = {name: value.to(device) for name, value in op.oracle(definition, inputs).items()}
        further = op.further(definition, case)
        assert further is not None
        order = asdict(further) | ({} if seconds is None else {"seconds": seconds})
        return cls(definition, order, given, found, device)

    @property
    def tokens(self) -> torch.Tensor:
        """Those that may be drawn of each row, most probable first."""
        return self.oracle["samples@tokens"]

    @property
    def probs(self) -> torch.Tensor:
        """Their probabilities."""
        return self.oracle["samples@probs"]

    def weights(self) -> torch.Tensor:
        """Their probabilities, and in a last column none for what lies outside."""
        return torch.cat([self.probs, torch.zeros_like(self.probs[:, :1])], 1)

    def outside(self) -> torch.Tensor:
        """Mass of each row that its filter cuts off."""
        kept = self.inputs["probs"].double().gather(1, self.tokens.clamp_min(0)) * (self.tokens >= 0)
        mass: torch.Tensor = 1 - kept.sum(-1)
        return mass.clamp_min(0)

    def drawn(self, weights: torch.Tensor, count: int, seed: int) -> torch.Tensor:
        """Draws of every row by weights, int64 [count, rows]."""
        torch.manual_seed(seed)
        [(_, found)] = table(self, weights)([torch.empty(count * len(weights), 0)])
        assert isinstance(found, torch.Tensor)
        return found.view(count, len(weights))

    def refused(self, samples: torch.Tensor) -> bool:
        """Whether the judge refuses draws."""
        optional = self.oracle["samples@optional"]
        return not judge_samples(samples, self.tokens, self.probs, optional, Samples().false_alarm)[0]

    def made(self, call: Draw, inputs: Mapping[str, torch.Tensor] | None = None) -> tuple[torch.Tensor, float]:
        """The draws that some code makes as a run asks for them, and the seconds that they took."""
        given = list((inputs or self.inputs).values())
        begun = time.monotonic()
        parts = further_draws(call, given, self.order, seed=1, device=given[0].device)
        samples = torch.cat([entries[0][1] for entries in parts])
        return samples.to(self.device), time.monotonic() - begun


Weights = Callable[[Known], torch.Tensor]
Samplers = Callable[[Known, int, int], torch.Tensor]


def mixture(part: float, other: Weights) -> Weights:
    """Draws of which a part comes from another distribution."""
    return lambda known: (1 - part) * known.weights() + part * other(known)


def most_likely(known: Known) -> torch.Tensor:
    """The likeliest token alone."""
    return torch.zeros_like(known.weights()).index_fill_(1, torch.tensor([0], device=known.device), 1.0)


def even(known: Known) -> torch.Tensor:
    """Every token of the support alike."""
    support = known.weights() > 0
    return support / support.sum(-1, keepdim=True)


def unfiltered(known: Known) -> torch.Tensor:
    """The distribution before the filter."""
    weights, outside = known.weights(), known.outside()
    weights = weights * (1 - outside[:, None])
    weights[:, -1] = outside
    return weights


def temperature(value: float) -> Weights:
    """Probabilities to the power of 1 / value."""

    def changed(known: Known) -> torch.Tensor:
        weights = known.weights()
        raised = torch.where(weights > 0, weights ** (1 / value), 0.0)
        return raised / raised.sum(-1, keepdim=True)

    return changed


def edge(factor: float, beyond: float = 0.0) -> Weights:
    """Rows whose k-th token has 0.002: that one by a factor, and the mass of the next one outside."""

    def changed(known: Known) -> torch.Tensor:
        weights = known.weights()
        for row in edges(known):
            last = int((known.probs[row] > 0).sum()) - 1
            weights[row, last] *= factor
            weights[row, -1] = beyond
        return weights

    return changed


def edges(known: Known) -> list[int]:
    """Rows whose least probable token has about 0.002."""
    least = torch.where(known.probs > 0, known.probs, 1.0).amin(-1)
    return ((least - 0.002).abs() < 1e-4).nonzero().flatten().tolist()


def again(part: float, *, beside: bool) -> Samplers:
    """A part of the draws is that of the equal row beside, or of the same row some draws before.

    A row's single draw has none before it: that sampler is right, and its power the rate of false alarms.
    """

    def sampler(known: Known, count: int, seed: int) -> torch.Tensor:
        samples = known.drawn(known.weights(), count, seed)
        generator = torch.Generator(known.device).manual_seed(seed + 1)
        chosen = torch.rand(samples.shape, device=known.device, generator=generator) < part
        if beside:
            samples[:, COPIES:] = torch.where(chosen[:, COPIES:], samples[:, :-COPIES], samples[:, COPIES:])
            return samples
        lag = min(16, count // 2)
        if not lag:
            return samples
        samples[lag:] = torch.where(chosen[lag:], samples[:-lag], samples[lag:])
        return samples

    return sampler


def of(weights: Weights) -> Samplers:
    """Draws by weights."""
    return lambda known, count, seed: known.drawn(weights(known), count, seed)


RIGHT = of(Known.weights)
WEIGHED: Mapping[str, Weights] = {
    "greedy 10 %": mixture(0.1, most_likely),
    "greedy 1 %": mixture(0.01, most_likely),
    "uniform 2 %": mixture(0.02, even),
    "unfiltered 1 %": mixture(0.01, unfiltered),
    "T 0.97": temperature(0.97),
    "T 1.03": temperature(1.03),
    "T 0.9": temperature(0.9),
    "T 1.1": temperature(1.1),
    "0.002 dropped, k - 1": edge(0.0),
    "0.002 doubled": edge(2.0),
    "k + 1 of 0.0019": edge(1.0, beyond=0.0019),
}
MISTAKES: Mapping[str, Samplers] = {
    **{name: of(weights) for name, weights in WEIGHED.items()},
    "3 % of the call before": again(0.03, beside=False),
    "3 % of the row beside": again(0.03, beside=True),
}
EASY = ("greedy 10 %", "T 0.9", "T 1.1", "0.002 doubled")  # which are not planted in kernels


def loop(known: Known) -> Draw:
    """The definition's reference, which takes row after row."""
    module = ModuleType("reference")
    exec(compile(known.definition.reference, "<reference>", "exec"), module.__dict__)  # noqa: S102 - our tests' own
    return lambda given: [(None, module.run(*given))]


def table(known: Known, weights: torch.Tensor) -> Draw:
    """A kernel that looks draws of all rows up in their cumulative probabilities."""
    cdf = weights.cumsum(-1)
    every = torch.cat([known.tokens, torch.full_like(known.tokens[:, :1], NONE)], 1)

    def call(given: Sequence[Any]) -> list[tuple[str | None, Any]]:
        times = len(given[0]) // len(cdf)
        wanted = torch.rand((len(cdf), times), dtype=cdf.dtype, device=cdf.device) * cdf[:, -1:]
        picks = torch.searchsorted(cdf, wanted, right=True).clamp_max(cdf.shape[1] - 1)
        return [(None, every.gather(1, picks).T.reshape(-1))]

    return call


def stuck(draw: Draw) -> Draw:
    """A kernel that begins with the same random numbers in every call."""

    def call(given: Sequence[Any]) -> list[tuple[str | None, Any]]:
        torch.manual_seed(0)
        return draw(given)

    return call


def race(given: Sequence[Any]) -> list[tuple[str | None, Any]]:
    """A kernel in plain PyTorch: sort, filter, and the largest probability by exponential noise."""
    values, places = given[0].sort(dim=-1, descending=True)
    k = given[1].long()[:, None]
    values = values.masked_fill(torch.arange(values.shape[1], device=values.device) >= k.clamp_min(1), 0.0)
    noise = torch.empty_like(values, dtype=torch.float64).exponential_()
    return [(None, places.gather(1, (values / noise).argmax(-1, keepdim=True)).flatten())]


def flashinfer_kernels(known: Known) -> Mapping[str, Draw]:
    """FlashInfer's top-k sampler, right and with mistakes around it; nothing where it is not installed."""
    if known.device.type != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return {}
    sampling = importlib.import_module("flashinfer.sampling")

    def drawn(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
        seed = int(torch.randint(1 << 62, ()))
        generator = torch.Generator(device=probs.device).manual_seed(seed)
        found: torch.Tensor = sampling.top_k_sampling_from_probs(probs, top_k, generator=generator)
        return found.long()

    def kernel(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Draw:
        return lambda given: [(None, change(given[0], given[1]))]

    def mixed(part: float, other: Callable[[torch.Tensor], torch.Tensor]) -> Draw:
        def change(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
            chosen = torch.rand(len(probs), device=probs.device) < part
            return torch.where(chosen, other(probs), drawn(probs, top_k))

        return kernel(change)

    def powered(value: float) -> Draw:
        def change(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
            raised = probs ** (1 / value)
            return drawn(raised / raised.sum(-1, keepdim=True), top_k)

        return kernel(change)

    return {
        "right": kernel(drawn),
        "greedy 1 %": mixed(0.01, lambda probs: probs.argmax(-1)),
        "T 0.97": powered(0.97),
        "T 1.03": powered(1.03),
        "k - 1": kernel(lambda probs, k: drawn(probs, (k - 1).clamp_min(1))),
        "k + 1": kernel(lambda probs, k: drawn(probs, k + 1)),
        "k of the next row": kernel(lambda probs, k: drawn(probs, k.roll(1))),
    }


def caught(known: Known) -> tuple[list[str], list[str]]:
    """Kernels with planted mistakes, each run once: all of them, and those that were not refused."""
    planted = {name: table(known, weights(known)) for name, weights in WEIGHED.items() if name not in EASY}
    planted["same numbers in every call"] = stuck(table(known, known.weights()))
    planted |= {f"FlashInfer, {name}": draw for name, draw in flashinfer_kernels(known).items() if name != "right"}
    return list(planted), [name for name, draw in planted.items() if not known.refused(known.made(draw)[0])]


def samplers(known: Known, device: torch.device) -> list[tuple[str, Draw, dict[str, torch.Tensor]]]:
    """Who draws, with the inputs that it gets."""
    on_cpu = {name: value.cpu() for name, value in known.inputs.items()}
    found = [("reference, CPU", loop(known), on_cpu)]
    if device.type == "cuda":
        found.append(("reference, GPU", loop(known), known.inputs))
    found.append((f"PyTorch kernel, {device.type}", race, known.inputs))
    right = flashinfer_kernels(known).get("right")
    return [*found, ("FlashInfer", right, known.inputs)] if right is not None else found


def main() -> int:
    """Print the table; 1: a right sampler was refused, or a planted one was not."""
    options = PARSER.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)  # as in a worker, whose own seconds are counted
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}")
    say(f"| who | vocabulary | draws | s | {' | '.join(MISTAKES)} |")
    say("|---|---:|---:|---:|" + "---:|" * len(MISTAKES))
    alarms = right = 0
    escaped: list[str] = []
    for vocabulary in options.vocabulary:
        known = Known.of(vocabulary, device, options.seconds)
        shares: dict[int, list[float]] = {}  # by the number of draws, which is all that they follow from
        drawing = samplers(known, device)
        per_row = -(-options.right // (len(options.vocabulary) * len(drawing)))
        for who, draw, inputs in drawing:
            samples, seconds = known.made(draw, inputs)
            alarms += known.refused(samples)
            count = len(samples)
            if count not in shares:
                shares[count] = [share(known, sampler, count, options.runs) for sampler in MISTAKES.values()]
            alarms += round(share(known, RIGHT, count, per_row, start=10_000 * right) * per_row)
            right += 1 + per_row
            cells = " | ".join(f"{one:.2f}" for one in shares[count])
            say(f"| {who} | {vocabulary:,} | {samples.numel():,} | {seconds:.1f} | {cells} |")
        names, missed = caught(known)
        escaped += [f"{vocabulary}: {name}" for name in missed]
        say(f"planted at {vocabulary:,}: {len(names) - len(missed)} of {len(names)} refused")
    say(f"right samplers refused: {alarms} of {right}; planted ones not refused: {escaped or 'none'}")
    return 1 if alarms or escaped else 0


def share(known: Known, sampler: Samplers, count: int, runs: int, *, start: int = 0) -> float:
    """Of runs with so many draws of each row, the part that is refused."""
    return sum(known.refused(sampler(known, count, start + seed)) for seed in range(runs)) / max(1, runs)


if __name__ == "__main__":
    sys.exit(main())
