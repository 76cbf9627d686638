"""Runs an untrusted reference or solution: nothing else of this project but the sandbox is in its process.

It knows no definition, op, oracle or case; `unpacked` and `traceproof.run.shadow` belong to it. Inputs
come as a file that is mapped into memory, outputs go to another as bare bytes; what the answer says of them is
checked by who reads it (`traceproof.run.transfer`). Standard library and torch only.
"""

import linecache
import os
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from traceproof.run import caches, shadow, timing, unpacked
from traceproof.run.device import ending_if_lost, set_seed, wait_asleep
from traceproof.run.draws import further_draws
from traceproof.run.poison import poisoned
from traceproof.run.returned import address_of, entries_of
from traceproof.run.streams import FIRST, arrive_late, changed_since, copies_in_order
from traceproof.run.tensor_files import (
    COPIED_BYTES,
    copies,
    draw_kept,
    placed,
    read_mapped,
    strided,
    views,
    write_back,
    write_outputs,
)
from traceproof.sandbox.model import CONNECTIONS

PACKAGE = __name__.partition(".")[0]
# How a call is made.
ORDINARY = ""
SAME_MEMORY = "same memory"  # with its inputs where those of the call before lay
STREAM = "stream"  # on another CUDA stream, on which the inputs are still being written
STRIDED = "strided"  # with inputs whose rows do not lie side by side
GRAPH = "graph"  # captured as a CUDA graph, and replayed
OF_OTHER_MEMORY = frozenset({SAME_MEMORY, STRIDED})  # whose inputs do not lie as they do in the file


def load_module(source: str, name: str) -> ModuleType:
    """Run a reference's source as a module of its own; its lines show in tracebacks as `<name>`."""
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    exec(compile(source, file, "exec"), module.__dict__)  # noqa: S102 - in the worker, on purpose
    return module


def setup(payload: dict[str, Any], scratch: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Called once in a worker: loads the source; the result makes one call.

    `payload` has `source`, or `solution` in its place (see `unpacked.load`), `name` (drawn for this worker),
    `device`, `threads`, `fill`.
    """
    _forget_the_project()
    torch.set_num_threads(payload["threads"])
    caches.use_own(scratch)
    device = torch.device(payload["device"])
    channels = (payload["solution"] or {}).get("channels")
    if channels is not None:
        os.environ[CONNECTIONS] = str(channels)  # read when the GPU is opened
    if payload["solution"] is None:  # nobody times it
        wait_asleep(device)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # opens it, in no call's time
    with poisoned(payload["fill"]):  # names taken out of torch here are called later
        if payload["solution"] is None:
            run = load_module(payload["source"], payload["name"]).run
        else:
            run = unpacked.load(payload["solution"], payload["name"], scratch)
    return _Caller(run, device, scratch, in_order=payload["solution"] is not None).answer


def _forget_the_project() -> None:
    """What has been imported to get here goes on; its names lead to it no more."""
    later = takewhile(lambda name: name != LAST, reversed(sys.modules))
    for name in [*OWN, *later]:
        if name.partition(".")[0] == PACKAGE:
            sys.modules.pop(name, None)
    root = str(Path(__file__).parents[2])
    sys.path[:] = [path for path in sys.path if path != root]
    os.environ.pop("PYTHONPATH", None)


class _Caller:
    """Makes the calls, and holds what the last one returned, so that memory used again shows.

    `in_order`: outputs are what the next work on the call's stream would read; otherwise what is there once the
    whole device is done.
    """

    def __init__(self, run: Callable[..., Any], device: torch.device, scratch: Path, *, in_order: bool) -> None:
        self._run, self._device, self._scratch = run, device, scratch
        self._in_order = in_order and device.type == "cuda"
        self._held: list[Any] = []
        self._inputs: list[Any] = []  # of the call before
        self._graph: torch.cuda.CUDAGraph | None = None

    def answer(self, item: dict[str, Any]) -> dict[str, Any]:
        """Make one call (the item is an `Order`, with whether to `hold` what it returned)."""
        with ending_if_lost(self._device):
            return self._answer(item)

    def _answer(self, item: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(item["threads"])
        mapped = read_mapped(self._scratch / item["data"], item["inputs"])
        on_gpu = self._device.type == "cuda"
        inputs, before = self._at_once(item) or (self._placed(item, mapped), None)
        if item["timing"] is not None:
            return self._timed(item, inputs)
        before = copies(inputs) if on_gpu and before is None else before
        side = torch.cuda.Stream(priority=FIRST) if item["how"] == STREAM else None  # type: ignore[no-untyped-call]
        with poisoned(item["fill"]):
            returned, odd = self._called(item, inputs, side)
        taken = copies_in_order(returned, side) if self._in_order else returned
        self._synchronise()  # a copy to the host waits for the current stream alone
        values = [value for _, value in returned]
        late = [place for place, (_, value) in enumerate(taken) if changed_since(value, values[place])]
        aliased = [] if item["destinations"] else self._aliased(inputs, values)
        outputs = write_outputs(self._scratch / item["out"], taken)
        in_file = on_gpu and item["how"] not in OF_OTHER_MEMORY
        written = write_back(mapped, inputs, before) if in_file else []
        if in_file and item["surrounded"]:
            self._write_whole(item, inputs)
        if not item["mode"]:
            self._held = values if item["hold"] else []
            self._inputs = inputs
        conduct = {"aliased": aliased, "subclassed": sorted(odd), "written": written, "late": late}
        return {"outputs": outputs, **conduct}

    def _timed(self, item: dict[str, Any], inputs: Sequence[Any]) -> dict[str, Any]:
        """Repetitions of a call with their times, and the outputs of the last one."""
        destinations = item["destinations"]
        set_seed(item["seeds"][0], self._device)
        watch = timing.Stopwatch(inputs, destinations, self._device, item["seeds"][0])
        times, returned, given = timing.run(lambda values: self._run(*values), watch, item["timing"])
        entries: list[tuple[str | None, Any]] = []
        if item["timing"]["call"]:
            places = [(None, value) for value in given[len(given) - destinations :]]
            entries = [*places] if destinations else entries_of(returned)
        outputs = write_outputs(self._scratch / item["out"], entries)
        return {"outputs": outputs, "aliased": [], "subclassed": [], "written": [], "late": [], "times": times}

    def _aliased(self, inputs: Sequence[Any], values: Sequence[Any]) -> list[int]:
        """Which of the values share memory with an input, a value before, or one of the call before."""
        taken = {address_of(value) for value in (*inputs, *self._held)} - {None}
        aliased = []
        for index, value in enumerate(values):
            address = address_of(value)
            if address in taken:
                aliased.append(index)
            taken |= {address} - {None}
        return aliased

    def _at_once(self, item: dict[str, Any]) -> tuple[list[Any], list[Any]] | None:
        """Inputs on a GPU and what they were, copied there in one go; None: the call wants them otherwise."""
        file = self._scratch / item["data"]
        usual = item["how"] not in OF_OTHER_MEMORY and not item["surrounded"] and item["timing"] is None
        if self._device.type != "cuda" or not usual or not 0 < file.stat().st_size <= COPIED_BYTES:
            return None
        found = placed(file, item["inputs"], self._device)
        self._synchronise()  # whatever stream the call uses, its inputs are there
        return found

    def _placed(self, item: dict[str, Any], mapped: Sequence[Any]) -> list[Any]:
        """Inputs as a call gets them: in the file itself, on a GPU, or in the memory of the call before.

        On a GPU, inputs with surroundings lie in one buffer as they do in the file.
        """
        if item["how"] == SAME_MEMORY:
            for place, value in zip(self._inputs, mapped, strict=True):
                if isinstance(value, torch.Tensor):
                    place.copy_(value)
            return [
                place if isinstance(place, torch.Tensor) else value
                for place, value in zip(self._inputs, mapped, strict=True)
            ]
        tensors = [value for value in mapped if isinstance(value, torch.Tensor)]
        if item["how"] == STRIDED:
            count = len(mapped) - item["destinations"]
            return [
                strided(value.to(self._device), room=place < count) if isinstance(value, torch.Tensor) else value
                for place, value in enumerate(mapped)
            ]
        if self._device.type != "cuda" or not item["surrounded"] or not tensors:
            return [value.to(self._device) if isinstance(value, torch.Tensor) else value for value in mapped]
        whole = torch.from_file(str(self._scratch / item["data"]), size=item["size"], dtype=torch.uint8)
        return views(whole.to(self._device), item["inputs"])

    def _called(
        self, item: dict[str, Any], inputs: Sequence[Any], side: torch.cuda.Stream | None
    ) -> tuple[list[tuple[str | None, Any]], set[int]]:
        """What a call returns, in the form of `_returned`, made as the order says."""
        if item["mode"]:
            return self._followed(item, inputs)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                arrive_late(inputs)
                return self._returned(item, inputs)
        if item["how"] == GRAPH:
            return self._replayed(item, inputs)
        return self._returned(item, inputs)

    def _replayed(
        self, item: dict[str, Any], inputs: Sequence[Any]
    ) -> tuple[list[tuple[str | None, Any]], set[int]]:
        """What a CUDA graph gives that was captured on other contents: a replay must compute, not repeat."""
        kept = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        tensors = [value for value in inputs if isinstance(value, torch.Tensor) and value.dim()]
        for value in tensors:
            if (
                value.is_floating_point() and value.itemsize > 1
            ):  # whole numbers may be places, which stay in range
                value.copy_(value.flip(0))
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._returned(item, inputs)  # what is compiled or allocated on first use is not captured
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()  # which the outputs' memory belongs to
        with torch.cuda.graph(self._graph):
            returned = self._entries_of(inputs, item["destinations"])
        for place, value in zip(inputs, kept, strict=True):
            if isinstance(place, torch.Tensor):
                place.copy_(value)
        self._graph.replay()
        self._synchronise()
        return returned, set()

    def _returned(
        self, item: dict[str, Any], inputs: Sequence[Any]
    ) -> tuple[list[tuple[str | None, Any]], set[int]]:
        """What the reference returned, by name where it gives names, and the places of tensors of other classes.

        Draws are stacked along a new first axis, those with repeated rows after the others.
        """
        draws = []
        odd: set[int] = set()
        for seed in item["seeds"]:
            set_seed(seed, self._device)
            entries = self._entries_of(inputs, item["destinations"])
            odd |= {
                place
                for place, (_, value) in enumerate(entries)
                if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor
            }
            draws.append([(name, draw_kept(value)) for name, value in entries] if item["trials"] else entries)
        if not item["trials"]:
            return draws[0], odd
        columns = zip(*draws, strict=True)
        stacked = [(column[0][0], _stacked([value for _, value in column])) for column in columns]
        if item["further"] is None:
            return stacked, odd
        destinations = item["destinations"]
        more = further_draws(
            lambda given: self._entries_of(given, destinations),
            inputs,
            item["further"],
            seed=item["seeds"][-1],
            device=self._device,
            destinations=destinations,
        )
        parts = zip(*([(name, value.cpu()) for name, value in stacked], *more), strict=True)
        return [(part[0][0], torch.cat([value for _, value in part])) for part in parts], odd

    def _entries_of(self, inputs: Sequence[Any], destinations: int) -> list[tuple[str | None, Any]]:
        """One call; the last `destinations` of the inputs are the places of its outputs."""
        if not destinations:
            return entries_of(self._run(*inputs))
        self._run(*inputs)
        return [(None, value) for value in inputs[len(inputs) - destinations :]]

    def _followed(
        self, item: dict[str, Any], inputs: Sequence[Any]
    ) -> tuple[list[tuple[str | None, Any]], set[int]]:
        """What one draw returns under a mode of `shadow`, in the form of `_returned`."""
        set_seed(item["seeds"][0], self._device)
        return shadow.run(item["mode"], self._run, inputs, entries_of), set()

    def _write_whole(self, item: dict[str, Any], inputs: Sequence[Any]) -> None:
        """Write a GPU's buffer of inputs with their surroundings back to the file."""
        held = next((value for value in inputs if isinstance(value, torch.Tensor)), None)
        if held is None:
            return
        file = str(self._scratch / item["data"])
        place = torch.from_file(file, shared=True, size=item["size"], dtype=torch.uint8)
        place.copy_(torch.empty(0, dtype=torch.uint8, device=self._device).set_(held.untyped_storage()))

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _stacked(draws: Sequence[torch.Tensor]) -> torch.Tensor:
    """Draws along a new first axis, where they lie if all lie there."""
    alike = len({value.device for value in draws}) == 1
    return torch.stack(list(draws) if alike else [value.cpu() for value in draws])


# Known before the fork: reading a thousand names in a worker would copy the pages that their counts lie in.
OWN = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
LAST = next(reversed(sys.modules))
