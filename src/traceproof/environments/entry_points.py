"""What can not be imported of the APIs that adapters name.

`python -m traceproof.environments.entry_points TRUTH...` runs in a stack's interpreter and prints a JSON object
on its last line: name -> the problem, or null.
"""

import gc
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from itertools import chain

from traceproof.ops import lookup
from traceproof.ops.adapter import resolve, version
from traceproof.reasons import Unavailable
from traceproof.stacks import STACK_OF, STACKS, Stack


def problems(truth: str) -> Iterator[tuple[str, str | None]]:
    """Every entry point that a ground truth's adapters use, with what is wrong with it."""
    stack = STACKS[STACK_OF[truth]]
    if version(stack) is None and importlib.util.find_spec(stack.package) is None:
        yield stack.distribution, "is not installed"
        return
    served = sorted(lookup.op_types(truth))
    adapters = [adapter for op_type in served for adapter in lookup.adapters(truth, op_type)]
    packages = {package for adapter in adapters for package in adapter.packages}
    for module in sorted(packages | set(stack.modules)):  # before anything stands in for one
        yield module, _import(module)
    own = sorted({key for adapter in adapters for key in adapter.apis} - stack.apis.keys())
    for key in (*stack.apis, *own):
        yield f"{key} ({stack.places(key)[0]})", _resolve(stack, key)


def _import(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever an import raises is the answer
        return _text(error)
    return None


def _resolve(stack: Stack, key: str) -> str | None:
    try:
        found = resolve(stack, (key,))
    except Exception as error:  # noqa: BLE001 - whatever an import raises is the answer
        return _text(error)
    if isinstance(found, Unavailable):
        return None if key in stack.optional else found.message
    return "is None: its package could not import what is behind it" if found[key] is None else None


def _text(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"


if __name__ == "__main__":
    found = dict(chain.from_iterable(map(problems, sys.argv[1:])))
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    gc.freeze()  # ending, Python would look for cycles in all of torch: half a second
