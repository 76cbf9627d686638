"""A kernel library's tests of linear attention: which axes their parameters cover."""

import json
import os
import subprocess
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from traceproof.coverage.model import Axis, Chosen, Coverage, Space, Values, cover
from traceproof.errors import TraceproofError
from traceproof.programs import for_untrusted, telling
from traceproof.stacks import STACKS

LIBRARY = next(stack for stack in STACKS.values() if stack.linear_attention)  # in whose environment tests are read
SECONDS = 600.0  # to collect a library's whole suite
Parameters = Mapping[str, Any]
VERIFIERS = ("reference", "gradcheck", "sanity")


def _number(parameters: Parameters, *names: str) -> float | None:
    return next((parameters[name] for name in names if isinstance(parameters.get(name), int | float)), None)


def _layout(test: str, parameters: Parameters) -> str:
    named = "varlen" in test or "cu_seqlens" in parameters
    return "variable" if named or parameters.get("varlen") else "dense"


def _direction(test: str, _: Parameters) -> str:
    return "backward" if "bwd" in test or "backward" in test else "forward"


def _yes(parameters: Parameters, *names: str) -> str:
    return "yes" if any(bool(parameters.get(name)) for name in names) else "no"


def _heads(_: str, parameters: Parameters) -> str:
    keys, values = _number(parameters, "H", "num_heads"), _number(parameters, "HV", "num_v_heads")
    return "grouped" if keys is not None and values is not None and values > keys else "equal"


def _dims(_: str, parameters: Parameters) -> str:
    key, value = _number(parameters, "K", "D", "head_dim"), _number(parameters, "V", "Dv", "head_v_dim")
    factor = _number(parameters, "expand_v")
    different = value is not None and key is not None and value != key
    return "different" if different or (factor is not None and factor != 1) else "equal"


def _length(_: str, parameters: Parameters) -> str:
    length = parameters.get("T", parameters.get("seq_len", parameters.get("cu_seqlens")))
    ends = length if isinstance(length, list | tuple) else [0, length or 0]
    lengths = [b - a for a, b in pairwise(ends)]
    return "whole chunks" if all(one % 64 == 0 for one in lengths) else "part of a chunk"


def _verifier(parameters: Parameters, names: Collection[str]) -> str:
    """How a test knows a right answer: by a gradient check, by a reference, or by no more than sanity."""
    named = str(parameters.get("verifier", ""))
    if named in VERIFIERS:
        return named
    words = " ".join(names).lower()
    if "gradcheck" in words:
        return "gradcheck"
    compares = any(word in words for word in ("naive", "reference", "assert_close", "allclose", "ref"))
    return "reference" if compares or not names else "sanity"


READERS: Mapping[str, Callable[[str, Parameters], str]] = {
    "layout": _layout,
    "direction": _direction,
    "length": _length,
    "initial_state": lambda _, p: _yes(p, "initial_state", "use_initial_state", "h0", "has_state"),
    "final_state": lambda _, p: _yes(p, "final_state", "output_final_state", "ht"),
    "gate": lambda _, p: _yes(p, "use_gate_in_kernel", "gate_in_kernel", "gate"),
    "beta": lambda _, p: str(p.get("beta", "head")),
    "beta_sigmoid": lambda _, p: (
        "in kernel" if _yes(p, "use_beta_sigmoid", "use_beta_sigmoid_in_kernel") == "yes" else "raw"
    ),
    "safe_gate": lambda _, p: _yes(p, "safe_gate", "use_safe_gate"),
    "qk_norm": lambda _, p: _yes(p, "use_qk_l2norm_in_kernel", "qk_norm", "qk_l2norm"),
    "value_heads": _heads,
    "head_dims": _dims,
    "dtype": lambda _, p: str(p.get("dtype", "unknown")).removeprefix("torch."),
}


def read(test: str, parameters: Parameters, names: Collection[str] = ()) -> Values:
    """Values of one parametrised test: its name, its parameters, and the names that its code uses."""
    found = {name: frozenset({reader(test, parameters)}) for name, reader in READERS.items()}
    return found | {"verifier": frozenset({_verifier(parameters, names)})}


def _reachable(chosen: Chosen) -> bool:
    """A gradient check is of gradients, and finite differences need float32 at least; a safe gate is a gate."""
    checked = chosen.get("verifier") == "gradcheck"
    return not (
        (checked and chosen.get("direction") == "forward")
        or (checked and chosen.get("dtype") in {"bfloat16", "float16"})
        or (chosen.get("safe_gate") == "yes" and chosen.get("gate") == "no")
    )


SPACE = Space(
    op_type="linear_attention",
    axes=(
        Axis("layout", ("dense", "variable"), "sequences packed without padding"),
        Axis("direction", ("forward", "backward"), "gradients have kernels of their own"),
        Axis("length", ("whole chunks", "part of a chunk"), "the mask of the last chunk"),
        Axis("initial_state", ("no", "yes"), "a state that is taken for zero"),
        Axis("final_state", ("no", "yes"), "a state that is not written"),
        Axis("gate", ("no", "yes"), "the decay computed inside the kernel"),
        Axis("beta", ("head", "vector"), "one step size a head, or one an element"),
        Axis("beta_sigmoid", ("raw", "in kernel"), "a step size that is given, or made of a logit in the kernel"),
        Axis("safe_gate", ("no", "yes"), "the bounded decay, which has a path of its own"),
        Axis("qk_norm", ("no", "yes"), "normalisation inside the kernel"),
        Axis("value_heads", ("equal", "grouped"), "which key head a value head reads"),
        Axis("head_dims", ("equal", "different"), "D and Dv mixed up"),
        Axis("verifier", VERIFIERS, "what would notice a wrong answer"),
        Axis("dtype", ("bfloat16", "float16", "float32"), "the precision that users have"),
    ),
    read=lambda definition, case: read(str(definition["test"]), case),
    reachable=_reachable,
)


def of_suite(path: Path, *, python: str) -> Coverage:
    """Coverage of a kernel library's tests of linear attention, by their parameters.

    Raises TraceproofError: no test could be collected, or that takes longer than SECONDS.
    """
    source = str(Path(__file__).resolve().parents[2])
    known = [part for part in (source, os.environ.get("PYTHONPATH")) if part]
    environment = for_untrusted() | {"PYTHONPATH": os.pathsep.join(known)}
    command = [python, "-m", "traceproof.coverage.collect", str(path.resolve())]
    try:
        with telling(f"collecting the tests of {path}"):
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
    except subprocess.TimeoutExpired as error:
        todo = "Give fewer files as --tests."
        raise TraceproofError(f"{path}: its tests were not collected in {SECONDS:g} s", todo=todo) from error
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if not rows:
        problems = done.stderr.strip().splitlines()[-5:]
        raise TraceproofError(f"{path}: no test was collected", problems=problems)
    return cover(SPACE, [read(row["test"], row["parameters"], row["names"]) for row in rows])
