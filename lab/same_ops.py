"""Whether ops are what they were: digests of all that they say of each definition, held against an earlier file.

`same_ops.py --dataset FOLDER... --out AFTER.json --against BEFORE.json`, with `--op-type NAME...` for some.
Per definition: its constants, cases, comparisons, ground truths; per case within --megabytes: inputs, expected
values, the baseline computation, and each call that a ground truth makes, with its arguments. Where no case of a
definition is so small, the scaled-down definition's cases are taken. Exit code 1: something differs.
"""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from traceproof.dataset.definition import Definition
from traceproof.dataset.tree import read_definition
from traceproof.digests import digest_json
from traceproof.draw import Draw
from traceproof.ops import lookup, registry
from traceproof.ops.adapter import resolve
from traceproof.ops.base import Values
from traceproof.ops.cases import ALL_SIZES, SIZES, Case
from traceproof.ops.op import Op
from traceproof.ops.scaled_down import ScaledDown, scaled_down_of
from traceproof.stacks import STACK_OF, STACKS

ARGUMENTS = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ARGUMENTS.add_argument(
    "--dataset", type=Path, nargs="+", required=True, help="folders with definitions below them"
)
ARGUMENTS.add_argument("--op-type", nargs="*", help="default: all")
ARGUMENTS.add_argument("--out", type=Path, required=True)
ARGUMENTS.add_argument("--against", type=Path, help="an earlier --out")
ARGUMENTS.add_argument("--megabytes", type=int, default=64, help="a case's most, by the op's own estimate")
ARGUMENTS.add_argument("--processes", type=int, default=2)
ADDRESS = re.compile(r" at 0x\w+")  # of a function, in a representation
CAPABILITIES = ((8, 0), (9, 0), (10, 0))  # for which the modules that adapters compile are asked
Digests = dict[str, Any]


class Recorder:
    """Stands in for what a package gives: notes each call in `log`, and gives another one."""

    def __init__(self, name: str, log: list[Any], real: Callable[..., Any] | None = None) -> None:
        self._name, self._log, self._real = name, log, real

    def __call__(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the package's own
        """Note the call; the function itself is called where it runs here."""
        self._log.append([self._name, *map(_shown, args), {key: _shown(value) for key, value in options.items()}])
        return self._real(*args, **options) if self._real else Recorder(f"{self._name}()", self._log)

    def __getattr__(self, name: str) -> "Recorder":
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(f"{self._name}.{name}", self._log)

    def __getitem__(self, index: int) -> "Recorder":
        return Recorder(f"{self._name}[{index}]", self._log)

    def __iter__(self) -> Iterator["Recorder"]:
        return iter((self[0], self[1]))


def _shown(value: Any) -> Any:  # noqa: ANN401 - any argument
    """A value as JSON: of a tensor dtype, shape, strides and the digest of its elements."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
        content = flat.view(torch.uint8).numpy().tobytes() if value.numel() > 1 else repr(value.tolist()).encode()
        return [
            str(value.dtype),
            list(value.shape),
            list(value.stride()),
            hashlib.sha256(content).hexdigest()[:24],
        ]
    if isinstance(value, Mapping):
        return {str(name): _shown(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    if isinstance(value, Recorder):
        return value._name  # noqa: SLF001 - its own file
    if isinstance(value, torch.Generator):
        return f"generator of seed {value.initial_seed()}"
    return repr(value)


def plan(op: Op, definition: Definition) -> list[Case]:
    """All cases of a definition."""
    return list(op.planned(definition, sizes=ALL_SIZES, seed=0))


def facts(op: Op, definition: Definition, cases: list[Case]) -> Digests:
    """What is said of a definition beside its numbers."""
    size = {case.id: (op.memory(definition, case), op.reference_excess(definition)) for case in cases}
    draws = {case.id: (op.trials(definition, case), repr(op.further(definition, case))) for case in cases}
    scaled_down = scaled_down_of(definition, op)
    said = {
        "constants": definition.constants.as_json(),
        "cases": [case.as_json() for case in cases],
        "memory": size,
        "draws": draws,
        "comparisons": ADDRESS.sub("", repr(dict(op.comparisons(definition)))),
        "rows": [op.row_axis(definition), op.summed(definition), sorted(op.mutated(definition))],
        "far": [repr(op.enlarged(definition)), op.no_inputs(definition)],
        "scaled_down": str(scaled_down),
    }
    return {name: digest_json(value) for name, value in said.items()}


def computed(op: Op, definition: Definition, case: Case, *, known: bool) -> Digests:
    """Inputs of a case, what is expected of it and the baseline."""
    inputs = drawn(op, definition, case)
    found: Digests = {"inputs": digest_json(_shown(inputs))}
    if known:
        found["expected"] = digest_json(_shown(op.oracle(definition, inputs)))
        found["baseline"] = digest_json(_shown(op.baseline(definition, inputs)))
    return found


def drawn(op: Op, definition: Definition, case: Case) -> Values:
    """The inputs of a case on the CPU."""
    draw = Draw(definition=definition.name, case=case.id, seed=case.seed, device=torch.device("cpu"))
    return op.inputs(definition, case, draw)


def truths(op: Op, definition: Definition, case: Case | None) -> Digests:
    """Which adapter serves a definition by each ground truth, what it says of itself, and its calls for a case."""
    found: Digests = {}
    for name in STACK_OF:
        adapter = lookup.adapter(name, definition)
        if adapter is None:
            continue
        modules = [repr(adapter.modules(definition, one)) for one in CAPABILITIES]
        signature = adapter.signature
        said = [sorted(signature.inputs), sorted(signature.optional), sorted(signature.outputs), signature.rows]
        dtypes = None if adapter.dtypes is None else sorted(adapter.dtypes)
        about = [adapter.name, said, adapter.apis, adapter.packages, dtypes, modules, adapter.sm]
        log: list[Any] = []
        if case is not None:
            api: Any = {key: Recorder(key, log) for key in adapter.apis}
            if name == "torch":
                real = resolve(STACKS[STACK_OF[name]], adapter.apis)
                assert isinstance(real, Mapping), real
                api = {key: Recorder(key, log, value) for key, value in real.items()}
            torch.manual_seed(0)  # of seeds that adapters draw
            try:
                log.append(_shown(adapter.call(api, definition, drawn(op, definition, case))))
            except Exception as error:  # noqa: BLE001 - what stands in for a package's result does not compute
                log.append(type(error).__name__)
        found[name] = [adapter.name, digest_json([about, log]), [str(entry)[:60] for entry in log]]
    return found


def of_definition(path: Path, megabytes: int) -> Digests:
    """All of one definition."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)  # memory that nothing was written to holds NaN
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # for adapters that ask
    definition = read_definition(path).definition
    op, unknown = registry.for_definition(definition)
    if op.no_inputs(definition) is not None:
        return {"no inputs": op.no_inputs(definition)}
    cases = plan(op, definition)
    found: Digests = {"unknown": unknown, **facts(op, definition, cases)}
    subject, small = definition, _small(op, definition, cases, megabytes)
    if not small and isinstance(scaled_down := scaled_down_of(definition, op), ScaledDown):
        subject = scaled_down.definition
        op, _ = registry.for_definition(subject)
        small = _small(op, subject, plan(op, subject), megabytes)
    found["computed"] = {
        case.id: computed(op, subject, case, known=unknown is None and not op.trials(subject, case))
        for case in small
    }
    found["oracle of draws"] = {
        case.id: digest_json(_shown(op.oracle(subject, drawn(op, subject, case))))
        for case in small[:2]
        if op.trials(subject, case) and unknown is None
    }
    full = next((case for case in (*small, *plan(op, subject)) if _called(op, subject, case)), None)
    found["truths"] = truths(op, subject, full)
    return found


def _small(op: Op, definition: Definition, cases: list[Case], megabytes: int) -> list[Case]:
    """The cases within the limit, of a size class the first two; else the two smallest, up to a gigabyte."""
    fit = [case for case in cases if op.memory(definition, case) <= megabytes << 20]
    if not fit:
        fit = sorted(cases, key=lambda case: op.memory(definition, case))[:2]
        fit = [case for case in fit if op.memory(definition, case) <= 1 << 30]
    kept = [[case for case in fit if case.size == size][: 2 if size in ALL_SIZES else 12] for size in _sizes(fit)]
    return list(chain.from_iterable(kept))


def _called(op: Op, definition: Definition, case: Case) -> bool:
    """Whether a case of ordinary size, which ground truths are called for."""
    ordinary = case.size in SIZES and 0 not in case.axes.values()
    return ordinary and op.memory(definition, case) <= 1 << 30


def _sizes(cases: list[Case]) -> list[str]:
    return list(dict.fromkeys(case.size for case in cases))


def differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Where two files differ, by the keys that lead there."""
    for key in dict.fromkeys((*before, *after)):
        here = f"{path}/{key}"
        if key not in before or key not in after:
            yield f"{here}: only {'after' if key in after else 'before'}"
        elif isinstance(before[key], dict) and isinstance(after[key], dict):
            yield from differences(before[key], after[key], here)
        elif before[key] != after[key]:
            yield f"{here}: {before[key]} -> {after[key]}"


def main() -> int:
    """Write the file; print what differs from the earlier one."""
    args = ARGUMENTS.parse_args()
    paths = sorted(path for folder in args.dataset for path in folder.rglob("definitions/**/*.json"))
    op_types = {path: str(json.loads(path.read_text(encoding="utf-8"))["op_type"]) for path in paths}
    paths = [path for path in paths if not args.op_type or op_types[path] in args.op_type]
    with ProcessPoolExecutor(args.processes, mp_context=get_context("forkserver")) as pool:
        made = list(pool.map(of_definition, paths, [args.megabytes] * len(paths)))
    found: dict[str, dict[str, Digests]] = {}
    for path, one in zip(paths, made, strict=True):
        found.setdefault(op_types[path], {})[path.stem] = one
    args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    counted = sum(len(one.get("computed", ())) for one in made)
    sys.stdout.write(f"{len(found)} op_types, {len(made)} definitions, {counted} cases computed\n")
    if args.against is None:
        return 0
    before = json.loads(args.against.read_text(encoding="utf-8"))
    wanted = {name: before.get(name, {}) for name in found} if args.op_type else before
    different = list(differences(wanted, json.loads(json.dumps(found))))
    sys.stdout.write("".join(f"{line}\n" for line in different) or "nothing differs\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
