"""How many wrong constants are proved or accepted: none may be.

    python lab/planted_constants.py --dataset results/dataset/<snapshot> --dataset tests/dataset

Each plant replaces one constant in the text of a reference by a wrong value (x 10, x 0.1, + 1, another activation,
natural logarithm for that of base 2 ...), and is tried twice: as the definition's reference, and as a kernel for
the right definition. It is caught where sources disagree, where an output fails in any case of `--sizes`, or, of a
reference, where nothing but itself states the constant. Cases above `--memory-gb` are left out; a plant of which
all cases are is counted apart. References are ours or the public dataset's and run in this process, not isolated.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_tree
from traceproof.ops import registry
from traceproof.ops.cases import Case
from traceproof.reasons import Verdict
from traceproof.run.case import SolvedCase, solve

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--dataset", type=Path, action="append", required=True)
PARSER.add_argument("--sizes", nargs="+", default=["small"])
PARSER.add_argument("--memory-gb", type=float, default=2.0)
PARSER.add_argument("--definition", nargs="*", help="these alone")
NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
SCALED = {"x 10": "({} * 10)", "x 0.1": "({} * 0.1)", "+ 1": "({} + 1)"}
# By constant: what stands in a text, and by the name of each plant what takes its place, `{}` the first group.
PLANTS: dict[str, tuple[str, dict[str, str]]] = {
    "epsilon": (rf"(?<=EPS = )({NUMBER})", dict.fromkeys(SCALED, "{}")),
    "epsilon in place": (r"\+ (EPS\b|eps\b)", {name: f"+ {text}" for name, text in SCALED.items()}),
    "weight offset": (
        r"(weight(?:\.to\(torch\.float32\)|\.float\(\)))",
        {"+ 1": "({} + 1)", "+ 0.1": "({} + 0.1)"},
    ),
    "gain centre": (r"(?<=\+ )((?:post_|next_)?gain_center)", SCALED),
    "activation": (
        r"((?:torch\.nn\.)?(?:functional|F)\.silu)\(",
        {"gelu": "torch.nn.functional.gelu(", "relu": "torch.relu(", "sigmoid": "torch.sigmoid("},
    ),
    "activation written out": (
        r"gate \* torch\.sigmoid\((gate)\)",
        {"gelu": "torch.nn.functional.gelu({})", "x 1.702": "gate * torch.sigmoid(1.702 * {})"},
    ),
    "form of gelu": (
        r"(torch\.nn\.functional\.gelu\(gate(?:, approximate=\"tanh\")?\))",
        {"silu": "torch.nn.functional.silu(gate)"},
    ),
    "gelu for its tanh": (r'gelu\(gate, (approximate="tanh")\)', {"exact": "gelu(gate)"}),
    "gelu by tanh": (r"gelu\((gate)\)", {"tanh": 'gelu(gate, approximate="tanh")'}),
    "silu of experts": (r"1\.0 \+ torch\.exp\(-(X2)\)", {"x 1.702": "1.0 + torch.exp(-1.702 * {})"}),
    "base of the log-sum-exp": (r"/ (math\.log\(2(?:\.0)?\))", {"natural": "", "10": "/ math.log(10.0)"}),
    "softmax scale": (r"(?<=\* )(sm_scale)\b", SCALED),
    "softmax scale of no input": (r"(math\.sqrt\(width\))", SCALED),
    "soft cap": (r"(?<=\/ )(logits_soft_cap)", SCALED),
    "causal mask, stated": (r"(?<=CAUSAL = )(1)", {"0": "0"}),
    "causal mask": (r"(?m)\+ length - (count)$", {"+ 1": "+ length - {} + 1", "- 1": "+ length - {} - 1"}),
    "diagonal": (r"(?<=1 \+ )(delta)\b", {"+ 1": "({} + 1)", "- 1": "({} - 1)"}),
    "window": (r"(?<=query - )(window_left)", {"+ 1": "({} + 1)"}),
    "scale of a state": (r"(?<!_)\b(scale) \* \(", {name: f"{text} * (" for name, text in SCALED.items()}),
    "gate of a state": (r"F\.(softplus)\(", {"relu": "F.relu(", "exp": "torch.exp("}),
    "rate of a state": (
        r"torch\.sigmoid\((b)\.float\(\)\)",
        {"x 10": "torch.sigmoid(10 * b.float())", "tanh": "b.float().tanh()"},
    ),
    "threshold of softplus": (r"(?<=clamp_max\()(20\.0)", {"x 0.1": "2.0"}),
    "top_k": (r"(?<=TOP_K = )(\d+)", {"- 1": "{}", "+ 1": "{}"}),
    "n_group": (r"(?<=\bN_GROUP = )(\d+)", {"x 0.5": "{}"}),
    "topk_group": (r"(?<=TOPK_GROUP = )(\d+)", {"- 1": "{}", "+ 1": "{}"}),
    "form of topk_ids": (r"topk_ids (>> 16)", {"plain": "topk_ids & 0xFFFF", ">> 15": "topk_ids >> 15"}),
    "renormalisation": (r"return (weights / weights\.sum\(-1, keepdim=True\))", {"none": "return weights"}),
    "renormalisation, stated": (r"(?<=RENORMALIZE = )([01])", {"other": "{}"}),
    "routing factor": (r"(routed_scaling_factor)  #", {name: f"{text}  #" for name, text in SCALED.items()}),
    "fp8 range": (r"/ (448\.0)", {"x 10": "/ 4480.0", "x 0.1": "/ 44.8", "+ 1": "/ 449.0"}),
    "int8 range": (r"/ (127\.0)", {"x 10": "/ 1270.0", "x 0.1": "/ 12.7", "+ 1": "/ 128.0"}),
    "product of scales": (r"\((A_scale \* B_scale)\)", SCALED),
    "top-k of an indexer": (r"(?<=actual_topk = min\()(topk)", {"- 1": "topk - 1", "x 0.1": "topk // 10"}),
    "relu of an indexer": (
        r"torch\.(relu)\(scores\)",
        {"none": "scores", "gelu": "torch.nn.functional.gelu(scores)"},
    ),
}
VALUES: dict[str, Callable[[float], float]] = {
    "x 10": lambda value: value * 10,
    "x 0.1": lambda value: value * 0.1,
    "+ 1": lambda value: value + 1,
    "- 1": lambda value: value - 1,
    "x 0.5": lambda value: value // 2,
    "other": lambda value: 1 - value,
}


@dataclass(frozen=True, slots=True)
class Plant:
    """A reference with one wrong constant."""

    definition: Definition
    constant: str
    change: str
    source: str


def plants(definition: Definition) -> Iterator[Plant]:
    """All plants of a definition."""
    text = definition.reference
    for constant, (pattern, changes) in PLANTS.items():
        for change, template in changes.items():

            def replaced(match: re.Match[str], change: str = change, template: str = template) -> str:
                own = match[1]
                if template == "{}":
                    value = VALUES[change](float(own))
                    own = repr(int(value) if own.isdigit() else value)
                return template.replace("{}", own)

            planted = re.sub(pattern, replaced, text)
            if planted != text:
                yield Plant(definition, constant, change, planted)
    yield from _other_pairing(definition)


def _other_pairing(definition: Definition) -> Iterator[Plant]:
    """The rotation of neighbours for that of halves, and the other way round."""
    if definition.op_type != "rope" or "def rotate" not in definition.reference:
        return
    neighbours = """def rotate(x, cos, sin):
    width = 2 * cos.shape[-1]
    even, odd = x[..., 0:width:2].float(), x[..., 1:width:2].float()
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., width:]], dim=-1)
"""
    halves = """def rotate(x, cos, sin):
    width = cos.shape[-1]
    low, high, rest = x[..., :width].float(), x[..., width : 2 * width].float(), x[..., 2 * width :]
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
"""
    other = neighbours if definition.constants.get("pairing") == "halves" else halves
    text = re.sub(r"(?s)def rotate\(.*?\n(?=\n\n)", lambda _: other, definition.reference, count=1)
    yield Plant(definition, "pairing of channels", "other", text)


def run_of(source: str) -> Callable[..., Any]:
    """The function `run` of a text."""
    space: dict[str, Any] = {}
    exec(compile(source, "planted", "exec"), space)  # noqa: S102 - our own plants
    found: Callable[..., Any] = space["run"]
    return found


def wrong(subject: SolvedCase, source: str, *, reference: bool) -> str:
    """What fails of a source's outputs in a case; empty: nothing."""
    inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in subject.inputs.values()]
    torch.manual_seed(subject.seed)
    try:
        returned = run_of(source)(*inputs)
    except Exception as error:  # noqa: BLE001 - a plant that raises is refused
        return f"{type(error).__name__}: {error}"
    values = returned if isinstance(returned, tuple | list) else [returned]
    outputs = dict(zip(subject.definition.outputs, values, strict=False))
    subject = replace(subject, outputs=outputs)
    for name, value in outputs.items():
        ruling = subject.ruling(name, value, reference=reference)
        if ruling.verdict is not Verdict.PASS:
            return f"{subject.case.id}, {name}: {ruling.reason}"
    return ""


def cases_of(definition: Definition, options: argparse.Namespace) -> list[Case]:
    """The cases that fit, adversarial ones first, which show most constants."""
    op, _ = registry.for_definition(definition)
    planned = op.planned(definition, sizes=options.sizes, seed=0)
    found = [case for case in planned if op.memory(definition, case) <= options.memory_gb * 2**30]
    return sorted(found, key=lambda case: (case.size != "adversarial", case.size == "edge"))


def fate(plant: Plant, cases: Sequence[Case], solved: Mapping[str, SolvedCase]) -> tuple[str, str]:
    """What becomes of a plant as a reference, and as a kernel of the right definition."""
    planted = plant.definition.model_copy(update={"reference": plant.source})
    if planted.constants.conflicts:
        as_reference = "sources disagree"
    elif registry.for_definition(planted)[1] is not None:
        as_reference = "no oracle"
    else:
        failed = any(wrong(solve(planted, case), plant.source, reference=True) for case in cases)
        as_reference = "numerics" if failed else "consistent" if planted.constants.alone else "PROVED"
    if plant.constant.endswith(", stated"):  # what the text computes is as before
        return as_reference, "not run"
    as_kernel = "ACCEPTED"
    for case in cases:
        if wrong(solved[case.id], plant.source, reference=False):
            as_kernel = "refused"
            break
    return as_reference, as_kernel


def main() -> int:
    """Print a table by constant and the sums; 1 if any plant was proved or accepted."""
    options = PARSER.parse_args()
    counts: dict[tuple[str, str], Counter[str]] = {}
    missed, unrun = [], []
    for dataset in options.dataset:
        for name, entry in sorted(read_tree(dataset).definitions.items()):
            definition = entry.definition
            if options.definition and name not in options.definition:
                continue
            solved = {case.id: solve(definition, case) for case in cases_of(definition, options)}
            cases = [  # a case that the right text fails would catch anything
                subject.case
                for subject in solved.values()
                if not wrong(subject, definition.reference, reference=False)
            ]
            for plant in plants(definition):
                if not cases and not definition.model_copy(update={"reference": plant.source}).constants.conflicts:
                    unrun.append(f"{name}: {plant.constant} {plant.change}")
                    continue
                fates = fate(plant, cases, solved) if cases else ("sources disagree", "not run")
                counts.setdefault((definition.op_type, plant.constant), Counter()).update(fates)
                if {"PROVED", "ACCEPTED"} & set(fates):
                    missed.append(f"{name}: {plant.constant} {plant.change}: {', '.join(fates)}")
                sys.stderr.write(f"{name}: {plant.constant} {plant.change}: {', '.join(fates)}\n")
    sys.stdout.write(_table(counts))
    total = sum(sum(found.values()) for found in counts.values()) // 2
    sys.stdout.write(f"\n{total} planted, {len(missed)} proved or accepted; {len(unrun)} too large here\n")
    sys.stdout.write("".join(f"  {line}\n" for line in (*missed, *(f"too large: {line}" for line in unrun))))
    return bool(missed)


def _table(counts: dict[tuple[str, str], Counter[str]]) -> str:
    kinds = ("sources disagree", "numerics", "consistent", "no oracle", "PROVED", "refused", "not run", "ACCEPTED")
    lines = [f"| op_type | constant | {' | '.join(kinds)} |", "|---|---|" + "---:|" * len(kinds)]
    lines += [
        f"| {' | '.join(key)} | {' | '.join(str(found[kind]) for kind in kinds)} |"
        for key, found in sorted(counts.items())
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
