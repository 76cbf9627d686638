"""References for definitions that have none: those of our own definitions of the same form, proved by the oracle.

    PYTHONPATH=src:tests:lab python lab/references.py --dataset DUMP --out FOLDER

Of each definition without a reference the references of `tests/dataset` for its op_type and inputs are tried in
small cases, edges and adversarial ones included. One whose answers the judge passes in all of them is written with
the definition, in the dataset's form, as a pull request has it. Says of how many there was none, and why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_file
from traceproof.ops import registry
from traceproof.reasons import Verdict
from traceproof.run.case import solve

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--dataset", type=Path, required=True, help="a folder of definitions")
PARSER.add_argument("--out", type=Path, required=True, help="a dataset, made if it is not there")
PARSER.add_argument("--only", nargs="*", default=[], help="these op_types alone")
OWN = Path(__file__).resolve().parents[1] / "tests" / "dataset" / "definitions"
MOST_BYTES = 1 << 30  # of a case


def given(definition: Definition) -> list[str]:
    """The names of inputs that must be given."""
    return [name for name, spec in definition.inputs.items() if not spec.optional]


def proved(definition: Definition, donor: Definition) -> bool:
    """Whether the judge passes all that a donor's reference gives for a definition; optional inputs are None."""
    module = ModuleType("reference")
    exec(compile(donor.reference, donor.name, "exec"), module.__dict__)  # noqa: S102 - our own code
    op = registry.get(definition.op_type).of_form(definition)
    tried = False
    for case in op.cases(definition, sizes=("small",), seed=0):
        if op.memory(definition, case) > MOST_BYTES:
            continue
        subject, tried = solve(definition, case), True
        inputs = (subject.inputs[name] for name in given(definition))
        try:
            made = module.run(*(one.clone() if isinstance(one, torch.Tensor) else one for one in inputs))
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
        outputs = (made,) if isinstance(made, torch.Tensor) else made
        subject = replace(subject, outputs=dict(zip(definition.outputs, outputs, strict=True)))
        for name, one in subject.outputs.items():
            if subject.ruling(name, one, reference=True).verdict is not Verdict.PASS:
                return False
    return tried


def main() -> None:
    """Writes the definitions, and says what became of the others."""
    options = PARSER.parse_args()
    donors = [read_file(path) for path in sorted(OWN.glob("*/*.json"))]
    fates: Counter[str] = Counter()
    for path in sorted(options.dataset.glob("**/*.json")):
        definition = read_file(path)
        if definition.reference or (options.only and definition.op_type not in options.only):
            continue
        if registry.for_definition(definition)[1] is not None:
            fates["no oracle"] += 1
            continue
        same = [one for one in donors if one.op_type == definition.op_type and given(one) == given(definition)]
        donor = next((one for one in same if proved(definition, one)), None)
        if donor is None:
            fates["refused by the oracle" if same else "no reference of its form"] += 1
            continue
        fates["written"] += 1
        text = donor.reference.rstrip() + called_in_order(definition)
        made = definition.model_copy(update={"reference": text}).as_json()
        target = options.out / "definitions" / definition.op_type / f"{definition.name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in made.items() if key not in {"dialect", "init", "init_entry"}}
        target.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(", ".join(f"{count} {fate}" for fate, count in fates.most_common()) + "\n")


def called_in_order(definition: Definition) -> str:
    """A `run` that takes all inputs of a definition in their order, where some are optional and left out."""
    wanted = given(definition)
    if wanted == list(definition.inputs):
        return "\n"
    inputs = ", ".join(definition.inputs)
    return f"\n\n\nof_needed = run\n\n\ndef run({inputs}):\n    return of_needed({', '.join(wanted)})\n"


if __name__ == "__main__":
    main()
