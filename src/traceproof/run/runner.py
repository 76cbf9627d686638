"""Runs an untrusted reference or solution; its process holds nothing else of this project but the sandbox.

It knows no definition, op, oracle or case; `traceproof.run.shadow` and `traceproof.run.calls` belong to it. Inputs
come in memory shared with the caller, outputs go to other such memory as bare bytes; the caller checks what the
answer says of them (`traceproof.run.untrusted`). Imports the standard library and torch alone.
"""

import importlib.util
import linecache
import math
import mmap
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from traceproof.run import calls, shadow, tensors
from traceproof.sandbox.model import CONNECTIONS, FILES, TRITON

PACKAGE = __name__.partition(".")[0]
# Ways to make a call.
ORDINARY = ""
SAME_MEMORY = "same memory"  # inputs lie where those of the call before lay
STREAM = "stream"  # on another CUDA stream, on which the inputs are still being written
STRIDED = "strided"  # inputs have a gap after each row
GRAPH = "graph"  # captured as a CUDA graph, and replayed
# many times beside other work on the GPU, on all or on a part of its multiprocessors; see `calls.under_load`
LOAD, LOAD_ON_PART = "load", "load on a part"
LOADED = 20  # times at most
FENCED_BEFORE, FENCED_BEHIND = "fenced before", "fenced behind"  # see `calls.Fences`
FENCED = frozenset({FENCED_BEFORE, FENCED_BEHIND})
OF_OTHER_MEMORY = frozenset({SAME_MEMORY, STRIDED, *FENCED})  # inputs are not at their places in shared memory
COPIED_BYTES = 2 << 30  # of inputs on a GPU copied to see what changed; larger ones are read back
NAME_CHARACTERS = 200
SLEEP = 600_000_000  # GPU cycles before late inputs arrive: some 0.3 s, as other processes use the GPU in between
FIRST = -1  # stream priority: its small kernels must not wait for large ones of another stream
CALLS_SECONDS = 0.25  # for calls before the one that counts: code that counts its calls may turn wrong
# Outputs of the last KEPT_CALLS calls, each of up to KEPT_BYTES, are checked after a call: they must not change.
KEPT_CALLS, KEPT_BYTES = 3, 1 << 20
ONE_HEAP_BYTES = 512 << 20  # of inputs, at most: with larger ones, gaps in the heap could reach the memory limit
FOLDER = "compiled"  # of compiled kernels, in the scratch folder
PLACES = re.compile(r"_(CACHE_DIR|WORKSPACE_BASE)$")  # environment variables that say where a package compiles to
GROUP = "__grp__*"  # written last by Triton: a kernel's folder that holds one is complete


def load_module(source: str, name: str) -> ModuleType:
    """Run a reference's source as a module; tracebacks show its lines as those of `<name>`."""
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    exec(compile(source, file, "exec"), module.__dict__)  # noqa: S102 - in the worker, on purpose
    return module


def setup(payload: dict[str, Any], scratch: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load the source, once per worker; returns the function that makes one call.

    `payload` has `source`, or `solution` (see `load_solution`), a random `name`, `device`, `threads`, `fill`.
    """
    # Forget this project's modules and folder; loaded code goes on working.
    later = takewhile(lambda name: name != LAST, reversed(sys.modules))
    for name in [*OWN, *later]:
        if name.partition(".")[0] == PACKAGE:
            sys.modules.pop(name, None)
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parents[2])]
    os.environ.pop("PYTHONPATH", None)
    torch.set_num_threads(payload["threads"])
    use_own(scratch)
    device = torch.device(payload["device"])
    channels = (payload["solution"] or {}).get("channels")
    if channels is not None:
        os.environ[CONNECTIONS] = str(channels)  # read when the GPU is opened
    if payload["solution"] is None:  # references are not timed
        calls.wait_asleep(device)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # opens the GPU outside of any call's time
    with calls.poisoned(payload["fill"]):  # also for functions of torch that the module binds to own names now
        if payload["solution"] is None:
            run = load_module(payload["source"], payload["name"]).run
        else:
            run = load_solution(payload["solution"], payload["name"], scratch)
    caller = _Caller(run, device, in_stream_order=payload["solution"] is not None)
    return calls.ending_if_lost(device)(caller.answer)


class _Caller:
    """Makes the calls, and keeps the last one's results, so that an output in reused memory shows.

    `in_stream_order`: outputs are what the next work on the call's stream reads; else when the device is done.
    """

    def __init__(self, run: Callable[..., Any], device: torch.device, *, in_stream_order: bool) -> None:
        self._run, self._device = run, device
        self._gpu = device.type == "cuda"
        self._in_stream_order = in_stream_order and self._gpu
        self._calls_seconds = CALLS_SECONDS * (2 if in_stream_order else 1)  # others run beside a solution
        self._outputs: list[Any] = []  # of the call before
        self._inputs: list[Any] = []  # likewise
        # small outputs of the last calls: (place among the outputs, tensor, copy of it)
        self._kept: deque[list[tuple[int, torch.Tensor, torch.Tensor]]] = deque(maxlen=KEPT_CALLS)
        self._graph: torch.cuda.CUDAGraph | None = None  # kept, as it owns its outputs' memory

    def answer(self, item: dict[str, Any]) -> dict[str, Any]:
        """Make one call: `item` is an `untrusted.CallRequest` as a dict, with descriptors of memory, FILES."""
        torch.set_num_threads(item["threads"])
        given, out = (mmap.mmap(descriptor, 0) for descriptor in item[FILES])
        for descriptor in item[FILES]:
            os.close(descriptor)
        if not self._gpu:
            calls.keep_memory(large=len(given) <= ONE_HEAP_BYTES)
        mapped = tensors.values_in(given, item["inputs"])
        calls.FENCES[:] = [calls.Fences(at_end=item["how"] == FENCED_BEHIND)] if item["how"] in FENCED else []
        inputs, before = self._placed(item, given, mapped)
        if item["timing"] is not None:
            return self._timed(item, inputs, out)
        side = torch.cuda.Stream(priority=FIRST) if item["how"] == STREAM else None  # type: ignore[no-untyped-call]
        with calls.poisoned(item["fill"]):
            returned, odd = self._called(item, inputs, side)
        taken = returned
        if self._in_stream_order:  # copies of plain tensors, made on the call's stream
            plain = (type(one) is torch.Tensor and one.layout == torch.strided for _, one in returned)
            with torch.cuda.stream(side):
                pairs = zip(returned, plain, strict=True)
                taken = [(name, value.clone() if copies else value) for (name, value), copies in pairs]
        self._synchronise()  # a copy to the host waits for the current stream only
        values = [value for _, value in returned]
        late = {place for place, (_, value) in enumerate(taken) if changed_since(value, values[place])}
        late |= {place for call in self._kept for place, value, copy in call if changed_since(copy, value)}
        conduct = {
            "late": sorted(late),
            "aliased": [] if item["destinations"] else self._aliased(inputs, values),
            "subclassed": sorted(odd),
        }
        outputs = write_outputs(out, taken)
        elsewhere = item["how"] in OF_OTHER_MEMORY
        conduct["written"] = write_back(mapped, inputs, before) if self._gpu or elsewhere else []
        # an empty tensor has no buffer
        held = next((value for value in inputs if isinstance(value, torch.Tensor) and value.numel()), None)
        if self._gpu and not elsewhere and item["surrounded"] and held is not None:
            # the whole buffer of inputs, with the bytes around them
            buffer = torch.empty(0, dtype=torch.uint8, device=self._device).set_(held.untyped_storage())
            for start, end in between(item["inputs"], len(given)):
                tensors.whole(given)[start:end] = buffer[start:end].cpu()
        if not item["mode"] and not calls.FENCES:  # tensors between fences are freed with them
            self._outputs, self._inputs = values, inputs
            self._keep(returned, item["destinations"], but=conduct["aliased"])
        crossed = any(fences.crossed for fences in calls.FENCES)
        ways = sorted({way for fences in calls.FENCES for way in fences.ways})
        calls.FENCES.clear()
        if self._gpu and calls.GpuPages.dead:
            self._synchronise()
            calls.GpuPages.sweep()
        return {"outputs": outputs, "crossed": crossed, "fences": ways, **conduct}

    def _timed(self, item: dict[str, Any], inputs: Sequence[Any], out: mmap.mmap) -> dict[str, Any]:
        """Timed repetitions of a call, and the outputs of the last one."""
        destinations = item["destinations"]
        calls.set_seed(item["seeds"][0], self._device)
        watch = calls.Stopwatch(inputs, destinations, self._device, item["seeds"][0])
        times, returned, given = calls.timed(lambda values: self._run(*values), watch, item["timing"])
        entries: list[tuple[str | None, Any]] = []
        if item["timing"]["call"]:
            places = [(None, value) for value in given[len(given) - destinations :]]
            entries = [*places] if destinations else entries_of(returned)
        return {"outputs": write_outputs(out, entries), "aliased": [], "subclassed": [], "times": times}

    def _aliased(self, inputs: Sequence[Any], values: Sequence[Any]) -> list[int]:
        """Places of values that share memory with an input, another value, or a value of the call before."""
        taken = {tensors.address_of(value) for value in (*inputs, *self._outputs)} - {None}
        aliased = []
        for index, value in enumerate(values):
            address = tensors.address_of(value)
            if address in taken:
                aliased.append(index)
            taken |= {address} - {None}
        return aliased

    def _placed(
        self, item: dict[str, Any], memory: mmap.mmap, mapped: Sequence[Any]
    ) -> tuple[list[Any], list[Any] | None]:
        """The call's inputs where the request wants them, and copies by which changes show; None: there are none.

        On a CPU they are in shared memory itself. On a GPU each has its own memory, or all one buffer laid out
        like shared memory if the bytes around them count. They are sent to a GPU in one copy if possible, since
        each copy waits for other processes.
        """

        def each_placed(place: Callable[[int, torch.Tensor], Any]) -> list[Any]:
            numbered = enumerate(mapped)
            return [place(index, value) if isinstance(value, torch.Tensor) else value for index, value in numbered]

        if item["how"] == SAME_MEMORY:
            return each_placed(lambda index, value: self._inputs[index].copy_(value)), None
        if calls.FENCES:
            return each_placed(lambda _, value: calls.FENCES[0].around(value.to(self._device))), None
        if item["how"] == STRIDED:
            count = len(mapped) - item["destinations"]
            return each_placed(lambda index, value: strided(value.to(self._device), room=index < count)), None
        if not self._gpu:
            return list(mapped), None
        before = tensors.values_in(tensors.whole(memory).to(self._device), item["inputs"])
        if item["timing"] is not None or len(memory) > COPIED_BYTES:
            return before, None
        inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in before]
        self._synchronise()  # the call may use any stream
        return (before, inputs) if item["surrounded"] else (inputs, before)

    def _called(
        self, item: dict[str, Any], inputs: Sequence[Any], side: torch.cuda.Stream | None
    ) -> tuple[list[tuple[str | None, Any]], set[int]]:
        """What a call returns, made as the request says: as `_returned`."""
        if item["mode"]:  # shadows are of a single call
            calls.set_seed(item["seeds"][0], self._device)
            return shadow.run(item["mode"], self._run, inputs, entries_of), set()
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                arrive_late(inputs)
                return self._returned(item, inputs)
        if item["how"] in {LOAD, LOAD_ON_PART}:
            calls.set_seed(item["seeds"][0], self._device)
            call = partial(self._entries_of, inputs, item["destinations"])
            with calls.part_of(self._device) if item["how"] == LOAD_ON_PART else nullcontext():
                return calls.under_load(call, inputs, LOADED, self._device), set()
        if item["how"] != GRAPH:
            return self._returned(item, inputs)
        # A CUDA graph captured on other contents: a replay must compute, not repeat.
        kept = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        for value in inputs:  # integers may be indices, which must stay in range
            floats = isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize > 1
            if floats and value.dim():
                value.copy_(value.flip(0))
        warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            self._returned(item, inputs)  # first use may compile or allocate, which can not be captured
        torch.cuda.current_stream().wait_stream(warm)
        self._graph = torch.cuda.CUDAGraph()
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
        """(name or None, value) of each output, and the places of tensors that are of a subclass."""
        subclassed: set[int] = set()
        destinations = item["destinations"]

        def call(given: Sequence[Any]) -> list[tuple[str | None, Any]]:
            entries = self._entries_of(given, destinations)
            if given is inputs:  # not a call with repeated rows
                found = [(n, one) for n, (_, one) in enumerate(entries) if isinstance(one, torch.Tensor)]
                subclassed.update(n for n, one in found if type(one) is not torch.Tensor)
                if item["trials"]:
                    self._keep(entries, destinations)
            return entries

        deadline = time.monotonic() + self._calls_seconds
        for _ in range(item["calls"] - 1):
            if time.monotonic() < deadline:
                self._keep(self._entries_of(inputs, destinations), destinations)
        if not item["trials"]:
            calls.set_seed(item["seeds"][0], self._device)
            return call(inputs), subclassed
        last_seed = item["seeds"][0] + len(item["seeds"]) * calls.GOLDEN
        given = {"seed": last_seed, "device": self._device, "destinations": destinations}
        return [*calls.stacked_draws(call, inputs, item["seeds"], further=item["further"], **given)], subclassed

    def _keep(
        self, entries: Sequence[tuple[str | None, Any]], destinations: int, but: Collection[int] = ()
    ) -> None:
        """Copy outputs, to see later whether they change; not those at `but`, which share memory with others."""
        if not destinations:
            plain = [(n, one) for n, (_, one) in enumerate(entries) if type(one) is torch.Tensor and n not in but]
            self._kept.append([(n, one, one.clone()) for n, one in plain if one.nbytes <= KEPT_BYTES])

    def _entries_of(self, inputs: Sequence[Any], destinations: int) -> list[tuple[str | None, Any]]:
        """One call's (name or None, value) of each output; the last `destinations` inputs are their places."""
        if not destinations:
            return entries_of(self._run(*inputs))
        self._run(*inputs)
        return [(None, value) for value in inputs[len(inputs) - destinations :]]

    def _synchronise(self) -> None:
        if self._gpu:
            torch.cuda.synchronize(self._device)


def entries_of(returned: Any) -> list[tuple[str | None, Any]]:  # noqa: ANN401 - what untrusted code returns
    """(name or None, value) of each output in a returned container. Raises TypeError: it may be lazy."""
    if isinstance(returned, dict):
        return [(str(name)[:NAME_CHARACTERS], value) for name, value in dict.items(returned)]
    if isinstance(returned, tuple):
        return [(None, value) for value in tuple.__iter__(returned)]
    if isinstance(returned, list):
        return [(None, value) for value in list.__iter__(returned)]
    if isinstance(returned, Iterable) and not isinstance(returned, torch.Tensor | str):
        raise TypeError(f"a {type(returned).__name__} was returned: return a tensor, a tuple, a list or a dict")
    return [(None, returned)]


def arrive_late(inputs: Sequence[Any]) -> None:
    """Fill floats with NaN until late work on the current stream writes them; integers may be indices."""
    floats = [value for value in inputs if isinstance(value, torch.Tensor) and value.is_floating_point()]
    kept = [value.clone() for value in floats]
    for value in floats:
        tensors.raw_bytes(value).fill_(0xFF)
    torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]  # noqa: SLF001 - nothing public delays a stream
    for value, right in zip(floats, kept, strict=True):
        value.copy_(right)


def changed_since(taken: Any, value: Any) -> bool:  # noqa: ANN401 - what untrusted code returns
    """Whether a tensor has changed since its copy `taken` was made."""
    if taken is value or taken.is_meta:
        return False
    return not torch.equal(tensors.raw_bytes(taken), tensors.raw_bytes(value))


def strided(value: torch.Tensor, *, room: bool) -> torch.Tensor:
    """A copy of a tensor; with `room`, ALIGNMENT bytes that are NaN follow each row."""
    if not room or value.dim() < 2 or not value.numel():
        return value.clone()
    columns = value.shape[-1]
    padded = value.new_empty((*value.shape[:-1], columns + tensors.ALIGNMENT // value.element_size()))
    tensors.raw_bytes(padded).fill_(0xFF)
    padded[..., :columns] = value
    return padded[..., :columns]


def write_outputs(memory: mmap.mmap, returned: Sequence[tuple[str | None, Any]]) -> list[dict[str, Any]]:
    """Write outputs at multiples of ALIGNMENT; returns (index, name, dtype, shape) of all, also too large ones."""
    descriptions: list[dict[str, Any]] = []
    present = [(index, name, value) for index, (name, value) in enumerate(returned) if value is not None]
    copies = tensors.plain_tensors([value for _, _, value in present])
    offset = 0
    for (index, name, _), plain in zip(present, copies, strict=True):
        dtype, shape = tensors.dtype_name(plain.dtype), list(plain.shape)
        descriptions.append({"index": index, "name": name, "dtype": dtype, "shape": shape})
        size = plain.numel() * plain.element_size()
        if 0 < size <= len(memory) - offset:
            tensors.whole(memory)[offset : offset + size] = plain.reshape(-1).view(torch.uint8)
        offset += tensors.aligned(size)
    return descriptions


def write_back(shared: Sequence[Any], inputs: Sequence[Any], before: Sequence[Any] | None) -> list[int]:
    """Copy inputs that a call changed, or all if `before` is None, into shared memory; returns their places."""
    places = [index for index, target in enumerate(shared) if isinstance(target, torch.Tensor) and target.numel()]
    if before is not None:
        changed = differing([(inputs[index], before[index]) for index in places])
        places = [index for index, differs in zip(places, changed, strict=True) if differs]
    for index in places:
        shared[index].copy_(inputs[index])
    return places


def between(specs: Sequence[Mapping[str, Any]], size: int) -> list[tuple[int, int]]:
    """Byte ranges of shared memory between the tensors that `specs` describe."""
    gaps, end = [], 0
    for spec in specs:
        if "dtype" in spec:
            gaps.append((end, spec["offset"]))
            end = spec["offset"] + math.prod(spec["shape"]) * getattr(torch, spec["dtype"]).itemsize
    return [(start, stop) for start, stop in [*gaps, (end, size)] if start < stop]


def differing(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Whether the bits of each pair differ; a GPU is waited for once."""
    flags = []
    for one, other in (tensors.words(*pair) for pair in pairs):
        device = max(one, other, key=len).device  # the bytes of an empty tensor lie on the CPU
        resized = len(one) != len(other)
        flags.append(torch.ones((), dtype=torch.bool, device=device) if resized else (one != other).any())
    return torch.stack(flags).tolist() if flags else []


def use_own(scratch: Path) -> None:
    """Point this process's compilers at folders of its own, with links to kernels that trusted code compiled.

    Some of PyTorch's operators compile Triton kernels on a GPU (2.14: products with an inner dimension of 1, sums,
    top-k), so a reference needs a cache that it may write; so does a solution that calls a package which compiles
    on first use. What it compiles must reach nobody else.
    """
    for name in filter(PLACES.search, list(os.environ)):
        compiled, private = Path(os.environ[name]), scratch / FOLDER / name.lower()
        private.mkdir(parents=True, exist_ok=True)
        for kernel in compiled.iterdir() if name == TRITON and compiled.is_dir() else ():
            target = private / kernel.name
            if (any(kernel.glob(GROUP)) or any(kernel.glob("*.so"))) and not target.exists():
                target.symlink_to(kernel)
        os.environ[name] = str(private)


COMPILED = (".cu", ".cpp", ".cc", ".cxx")
UNPACKED_AT = 1_000_000_000  # seconds since 1970, before any build: no source may look newer than its library
# folders of CUTLASS in a package such as FlashInfer
HEADERS = ("data/cutlass/include", "data/cutlass/tools/util/include")
JOBS = "4"  # compilers at a time: the worker may start only a few processes
BOUND = re.compile(r"\b(PYBIND11_MODULE|TORCH_LIBRARY|TVM_FFI_DLL_EXPORT_TYPED_FUNC)\b")


def load_solution(solution: Mapping[str, Any], name: str, scratch: Path) -> Callable[..., Any]:
    """The function of a solution: `files` (text by path), `entry` (`<file>::<function>`) and `binding`."""
    folder = scratch / name
    for path, text in solution["files"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        _write(folder / path, text)
    file, _, function = solution["entry"].partition("::")
    if file.endswith(COMPILED):
        return _built(folder, scratch / FOLDER / name, file, function, str(solution["binding"]))
    sys.dont_write_bytecode = True
    sys.path[:0] = [str((folder / file).parent), str(folder)]
    spec = importlib.util.spec_from_file_location(name, folder / file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return getattr(module, function)  # type: ignore[no-any-return]


def _write(target: Path, text: str) -> None:
    target.write_text(text, encoding="utf-8")
    with suppress(PermissionError):  # where Landlock alone keeps files: each worker compiles again
        os.utime(target, (UNPACKED_AT, UNPACKED_AT))


def _built(folder: Path, out: Path, file: str, function: str, binding: str) -> Callable[..., Any]:
    """Compile a solution into `out`, unless that was done, and return its entry point."""
    name = out.name
    out.mkdir(parents=True, exist_ok=True)
    os.environ["MAX_JOBS"] = JOBS
    sources = sorted(str(path) for path in folder.rglob("*") if path.suffix in COMPILED)
    include = [str(folder), *_headers()]
    if binding == "tvm-ffi":
        cpp = importlib.import_module("tvm_ffi.cpp")
        kinds = {"cuda_files": [one for one in sources if one.endswith(".cu")]}
        kinds["cpp_files"] = [one for one in sources if not one.endswith(".cu")]
        module = cpp.load(name=name, build_directory=str(out), extra_include_paths=include, **kinds)
        return module[function]  # type: ignore[no-any-return]
    if not any(BOUND.search(Path(one).read_text(encoding="utf-8")) for one in sources):
        text = (folder / file).read_text(encoding="utf-8")
        binding_code = f'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{ m.def("{function}", &{function}); }}'
        _write(folder / file, f"{text}\n{binding_code}\n")
    extension, places = importlib.import_module("torch.utils.cpp_extension"), {"extra_include_paths": include}
    module = extension.load(name=name, sources=sources, build_directory=str(out), verbose=False, **places)
    return getattr(module, function)  # type: ignore[no-any-return]


def _headers() -> list[str]:
    """Header folders in installed packages, found without importing these."""
    packages = [Path(place) for place in sys.path if place]
    return [str(found) for place in packages for name in HEADERS for found in sorted(place.glob(f"*/{name}"))]


# Collected before the fork: reading a thousand names in a worker would copy the pages of their reference counts.
OWN = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
LAST = next(reversed(sys.modules))
