"""Runs a stranger's reference: the only module of this project beside `traceproof.worker` in its process.

It knows no definition, op, oracle or case; `traceproof.untrusted.shadow` belongs to it. Inputs come as a file that
is mapped into memory, outputs go to another as bare bytes; what the answer says of them is checked by who reads it
(`traceproof.actors.measure`). Standard library and torch only.
"""

import functools
import linecache
import math
import mmap
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from traceproof.execution import caches
from traceproof.untrusted import shadow

CUDA_LOST = 70  # exit status of a worker whose GPU context is unusable
ALIGNMENT = 64  # bytes; tensors of a file start at multiples of it
PACKAGE = __name__.partition(".")[0]
NAME_CHARACTERS = 200
COPIED_BYTES = 2 << 30  # of inputs that are copied on a GPU rather than read back from it after each call

# Functions that give tensors without values, by where their names are looked up.
UNWRITTEN: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


@contextmanager
def poisoned(fill: float | None = math.nan) -> Iterator[None]:
    """While it is active, `torch.empty` and the like give filled tensors on any device.

    A reference that forgets to write a part of such memory gives whatever lay there: zeros of a fresh page, or its
    own earlier and right answer. The functions themselves are replaced: to look at every call of torch would cost
    loops over small tensors half as much again.

    Args:
        fill: of floating-point memory; integers get the largest one for NaN, else `fill` cut to their range. None:
            memory is left as it is.
    """
    if fill is None:
        yield
        return
    own = [(owner, name, vars(owner).get(name)) for owner, name in UNWRITTEN]
    for owner, name in UNWRITTEN:
        setattr(owner, name, _filling(getattr(owner, name), fill))
    try:
        yield
    finally:
        for owner, name, before in own:
            if before is None:
                delattr(owner, name)  # inherited
            else:
                setattr(owner, name, before)


def _filling(allocate: Callable[..., torch.Tensor], fill: float) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - whatever torch's function takes
        value = allocate(*args, **kwargs)
        with torch.no_grad():
            return value.fill_(_fill(value.dtype, fill))

    return filled


def _fill(dtype: torch.dtype, fill: float) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return fill if math.isnan(fill) else max(-240.0, min(240.0, fill))  # in the range of every float
    if dtype == torch.bool:
        return True
    return torch.iinfo(dtype).max if math.isnan(fill) else int(abs(fill)) % torch.iinfo(dtype).max


def load_module(source: str, name: str) -> ModuleType:
    """Run a reference's source as a module of its own; its lines show in tracebacks as `<name>`."""
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = ModuleType(name)
    module.__file__ = file
    sys.modules[name] = module
    exec(compile(source, file, "exec"), module.__dict__)  # noqa: S102 - in the worker, on purpose
    return module


def setup(payload: dict[str, Any], scratch: Path) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    """Called once in a worker: loads the source; the result makes one call.

    Args:
        payload: `source`, `name` (drawn for this worker), `device`, `threads`.
        scratch: the worker's folder.
    """
    _forget_the_project()
    torch.set_num_threads(payload["threads"])
    caches.use_own(scratch)
    with poisoned(payload["fill"]):  # names taken out of torch here are called later
        module = load_module(payload["source"], payload["name"])
    return _Caller(module.run, torch.device(payload["device"]), scratch).answer


def _forget_the_project() -> None:
    """What has been imported to get here goes on; its names lead to it no more."""
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
    root = str(Path(__file__).parents[2])
    sys.path[:] = [path for path in sys.path if path != root]
    os.environ.pop("PYTHONPATH", None)


class _Caller:
    """Makes the calls, and holds what the last one returned, so that memory used again shows."""

    def __init__(self, run: Callable[..., Any], device: torch.device, scratch: Path) -> None:
        self._run, self._device, self._scratch = run, device, scratch
        self._held: list[Any] = []

    def answer(self, item: dict[str, Any]) -> dict[str, Any] | None:
        """Make one call (the item is an `Order`, with whether to `hold` what it returned); None: there is none.

        An exception that leaves the GPU context unusable (an illegal address, say) ends the process, so that the
        pool starts another and the next case is not blamed for this one.
        """
        if "inputs" not in item:
            return None
        try:
            return self._answer(item)
        except Exception:
            if self._device.type == "cuda" and cuda_is_lost():
                traceback.print_exc()
                sys.stderr.write("the CUDA context is lost: this worker ends\n")
                sys.stderr.flush()
                os._exit(CUDA_LOST)
            raise

    def _answer(self, item: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(item["threads"])
        mapped = read_mapped(self._scratch / item["data"], item["inputs"])
        inputs = [value.to(self._device) if isinstance(value, torch.Tensor) else value for value in mapped]
        on_gpu = self._device.type == "cuda"
        before = copies(inputs) if on_gpu else None
        with poisoned(item["fill"]):
            returned, odd = self._followed(item, inputs) if item["mode"] else self._returned(item, inputs)
        self._synchronise()  # a copy to the host waits for the current stream alone
        values = [value for _, value in returned]
        addresses = [_address(value) for value in inputs]
        held = {_address(value) for value in self._held} - {None}
        aliased = []
        for index, value in enumerate(values):
            address = _address(value)
            if address is not None and (address in addresses or address in held):
                aliased.append(index)
            addresses.append(address)
        outputs = write_outputs(self._scratch / item["out"], returned)
        written = write_back(mapped, inputs, before) if on_gpu else []
        if not item["mode"]:
            self._held = values if item["hold"] else []
        return {"outputs": outputs, "aliased": aliased, "subclassed": sorted(odd), "written": written}

    def _returned(
        self, item: dict[str, Any], inputs: Sequence[Any]
    ) -> tuple[list[tuple[str | None, Any]], set[int]]:
        """What the reference returned, by name where it gives names, and the places of tensors of other classes.

        Draws are stacked along a new first axis.
        """
        draws = []
        odd: set[int] = set()
        for seed in item["seeds"]:
            torch.manual_seed(seed)
            entries = _entries(self._run(*inputs))
            odd |= {
                place
                for place, (_, value) in enumerate(entries)
                if isinstance(value, torch.Tensor) and type(value) is not torch.Tensor
            }
            draws.append([(name, plain_tensor(value)) for name, value in entries] if item["trials"] else entries)
        if not item["trials"]:
            return draws[0], odd
        columns = zip(*draws, strict=True)
        return [(column[0][0], torch.stack([value for _, value in column])) for column in columns], odd

    def _followed(
        self, item: dict[str, Any], inputs: Sequence[Any]
    ) -> tuple[list[tuple[str | None, Any]], set[int]]:
        """What one draw returns under a mode of `shadow`, in the form of `_returned`."""
        torch.manual_seed(item["seeds"][0])
        return shadow.run(item["mode"], self._run, inputs, _entries), set()

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def copies(inputs: Sequence[Any]) -> list[Any] | None:
    """A second copy of inputs on a GPU, to find what a call changed; None: they are too large for that."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if sum(value.numel() * value.element_size() for value in tensors) > COPIED_BYTES:
        return None
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]


def write_back(mapped: Sequence[Any], inputs: Sequence[Any], before: Sequence[Any] | None) -> list[int]:
    """Write inputs that a call changed on a GPU into their file (without a copy, all); gives their places."""
    written = []
    for index, (place, value) in enumerate(zip(mapped, inputs, strict=True)):
        if not isinstance(place, torch.Tensor) or not place.numel():
            continue
        if before is None or not torch.equal(_bits(value), _bits(before[index])):
            place.copy_(value)
            written.append(index)
    return written


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)


def cuda_is_lost() -> bool:
    """Whether the GPU context of this process can not be used any more."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _entries(returned: Any) -> list[tuple[str | None, Any]]:  # noqa: ANN401 - what strangers return
    if isinstance(returned, Mapping):
        return [(str(name)[:NAME_CHARACTERS], value) for name, value in returned.items()]
    return [(None, value) for value in (returned if isinstance(returned, tuple | list) else [returned])]


def _address(value: object) -> int | None:
    """Where a tensor's storage lies; None for anything without elements."""
    if type(value) is not torch.Tensor or not value.numel():
        return None
    return value.untyped_storage().data_ptr()


def plain_tensor(value: Any) -> torch.Tensor:  # noqa: ANN401 - what strangers return
    """The value as a plain CPU tensor that shares memory with nothing; a Python scalar becomes a 0-d tensor.

    Raises:
        TypeError: it is neither a tensor nor a number.
    """
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - what it holds, not what its class makes of it
            bare = torch.Tensor.as_subclass(value, torch.Tensor)
            return bare.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise TypeError(f"an output is a {type(value).__name__}, not a tensor or a number")


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name as messages have it."""
    return str(dtype).removeprefix("torch.")


def aligned(count: int) -> int:
    """The next place where a tensor may start."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def read_mapped(path: Path, specs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The values of a file of inputs: tensors that lie in the file itself, each a storage of its own, and scalars.

    What a call changes in them stands in the file.
    """
    values: list[Any] = []
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        held = mmap.mmap(file.fileno(), size) if size else None
    for spec in specs:
        if "dtype" not in spec:
            values.append(spec["value"])
            continue
        dtype = getattr(torch, spec["dtype"])
        count = math.prod(spec["shape"])
        if count and held is not None:
            flat = torch.frombuffer(held, dtype=dtype, count=count, offset=spec["offset"])
        else:
            flat = torch.empty(0, dtype=dtype)
        values.append(flat.reshape(spec["shape"]))
    return values


def write_outputs(path: Path, returned: Sequence[tuple[str | None, Any]]) -> list[dict[str, Any]]:
    """Write outputs one after another, each from the next multiple of ALIGNMENT on; gives what they are."""
    described: list[dict[str, Any]] = []
    with path.open("wb") as file:
        for index, (name, value) in enumerate(returned):
            if value is None:
                continue
            plain = plain_tensor(value)
            raw = plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
            described.append(
                {"index": index, "name": name, "dtype": dtype_name(plain.dtype), "shape": list(plain.shape)}
            )
            file.write(raw.numpy().data)
            file.write(bytes(aligned(raw.numel()) - raw.numel()))
    return described
