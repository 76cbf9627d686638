"""Runs code in float64 beside what it computes: every floating-point tensor has a float64 shadow.

The tensors that the code sees are its own, so every decision that it takes (dtypes, comparisons, indices) stays as
it is; each operation on them is also done on the shadows, in float64. A stated rounding, by a cast to a narrower
dtype or a copy into one, is made in the shadow as well. Only the last rounding of an output itself is taken back:
the judge allows for that one.

There are two other modes: sums in another order at the code's own precision, which shows what any right order may
lose; and equal values in another order, where an operation leaves their order open, since nobody specified what
follows from it. Where an operation states which of several equals it takes (a stable sort, argmax), it stays as it
is. This module runs in the process of untrusted code: standard library and torch alone.
"""

# Operations, their arguments and results are whatever torch's dispatcher passes; a storage has no public identity.
# ruff: noqa: ANN401, SLF001
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

FLOAT64, OTHER_ORDER = "float64", "other order"
OTHER_TIES = "other ties"  # FLOAT64 with equal values in another order
ORDERING = ("sort", "topk")  # names of operations that OTHER_TIES changes, looked for in the code's text
PURGED = 512  # new shadows after which those of freed tensors are dropped
BITS_TAKEN = "a tensor's bits are read as another dtype, which float64 does not have"
aten = torch.ops.aten
# Operations that move values: the rounded and the unrounded value both move.
MOVES = frozenset(
    {"clone", "copy", "copy_", "cat", "stack", "index", "index_select", "index_put", "index_put_", "gather"}
    | {"slice_scatter", "select_scatter", "scatter", "scatter_", "repeat", "flip", "roll", "constant_pad_nd"}
    | {"where", "contiguous", "_unsafe_index", "_index_put_impl_", "index_copy", "index_copy_", "_reshape_copy"}
)
RANDOM = frozenset(
    {"multinomial", "rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "bernoulli_", "uniform_"}
    | {"normal_", "normal", "exponential_", "random_", "randperm", "native_dropout", "log_normal_", "cauchy_"}
)
NARROW = frozenset({torch.bfloat16, torch.float16})
ORDER_DECIDES = 2.0**-19  # relative: 32 float32 roundings, some more than a sum of 1,000 terms loses


def modes_of(reference: str) -> tuple[str, ...]:
    """The modes to run a reference in: OTHER_TIES, the last, only where its text orders values."""
    orders = any(word in reference for word in ORDERING)
    return (FLOAT64, OTHER_ORDER, OTHER_TIES) if orders else (FLOAT64, OTHER_ORDER)


class UnsupportedError(RuntimeError):
    """Float64 can not follow what the code does; the text says what."""


class PlainMode(TorchDispatchMode):
    """A mode whose first operation does not import torch's compiler (a second); it sees what code compiles to."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Float64(PlainMode):
    """The dispatch mode that keeps the shadows; `instead` replaces some operations."""

    def __init__(self, instead: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._instead = instead
        # by storage: (it, dtype of its values, these values in float64, these without their last rounding)
        self._kept: dict[int, tuple[StorageWeakRef, torch.dtype, torch.Tensor, torch.Tensor]] = {}
        self._decided: dict[int, StorageWeakRef] = {}  # storages of integers that rounding may decide
        self._told = False  # whether Python has read a float or such an integer, from which all later may follow

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        named = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = _tensors((args, named))
        _check(name, tensors)
        floats = [one for one in tensors if one.is_floating_point()]
        if name == "_local_scalar_dense":
            self._told |= bool(floats) or self.decided(tensors[0])
            return self.value(floats[0]).item() if floats else func(*args, **named)
        if func is aten.view.dtype and floats and floats[0].element_size() > 1:
            raise UnsupportedError(BITS_TAKEN)
        for one in floats:  # before an operation in place changes the tensors from which shadows are made
            self._buffers(one)
        storages = {_key(one) for one in tensors}
        decided = bool(floats) or self._told or any(map(self.decided, tensors))
        out = self._instead.get(func, func)(*args, **named)
        results = _tensors(out)
        _check(name, results)
        self._told |= decided and not results
        if not tensors or name == "lift_fresh":  # a constant, which its dtype rounds
            if self._told:
                self._note_decided(results)
            return out
        if func._schema.is_mutable:
            self._changed(func, args, named, decided=decided)
            return out
        new_tensors = [one for one in results if _key(one) not in storages]
        if decided:
            self._note_decided(new_tensors)
        if any(one.is_floating_point() for one in new_tensors):
            self._shadowed(func, args, named, out)
        return out

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shadow of a floating-point tensor, in float64; a view if the tensor is one."""
        return self._buffers(tensor)[0].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def exact(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shadow without the last rounding."""
        return self._buffers(tensor)[1].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def decided(self, tensor: torch.Tensor) -> bool:
        """Whether integers follow from floating-point numbers, so that rounding may decide them."""
        return _key(tensor) in self._decided

    def _note_decided(self, tensors: Sequence[torch.Tensor]) -> None:
        for one in tensors:
            if not one.is_floating_point():
                self._decided[_key(one)] = StorageWeakRef(one.untyped_storage())

    def _buffers(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = _key(tensor)
        kept = self._kept.get(key)
        if kept is not None and kept[1] == tensor.dtype:
            return kept[2], kept[3]
        if len(self._kept) % PURGED == PURGED - 1:
            self._kept = {one: entry for one, entry in self._kept.items() if not entry[0].expired()}
            self._decided = {one: entry for one, entry in self._decided.items() if not entry.expired()}
        storage = tensor.untyped_storage()
        count = storage.nbytes() // tensor.element_size()
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (count,), (1,))
        wide = flat.to(torch.float64)
        self._kept[key] = (StorageWeakRef(storage), tensor.dtype, wide, wide.clone())
        return self._kept[key][2:]

    def _compute(self, func: Any, args: Any, named: Any, of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """The operation's result on shadows, which `of` gives."""

        def lifted(one: Any) -> Any:
            if isinstance(one, torch.Tensor):
                return of(one) if one.is_floating_point() else one
            return torch.float64 if isinstance(one, torch.dtype) and one.is_floating_point else one

        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # for factories without a dtype
        try:
            return self._instead.get(func, func)(*tree_map(lifted, args), **tree_map(lifted, named))
        except NotImplementedError as error:
            raise UnsupportedError(f"{func.overloadpacket.__name__} is not there in float64") from error
        finally:
            torch.set_default_dtype(before)

    def _shadowed(self, func: Any, args: Any, named: Any, out: Any) -> None:
        """Give an operation's new floating-point tensors their shadows."""
        name = func.overloadpacket.__name__
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name == "_to_copy" and source is not None and source.is_floating_point():
            self._keep(out, *_rounded(self.value(source), self.exact(source), source.dtype, out.dtype))
            return
        results = _tensors(self._compute(func, args, named, self.value))
        exacts = _tensors(self._compute(func, args, named, self.exact)) if name in MOVES else results
        for native, wide, unrounded in zip(_tensors(out), results, exacts, strict=True):
            if native.is_floating_point():
                self._keep(native, wide, unrounded)

    def _changed(self, func: Any, args: Any, named: Any, *, decided: bool) -> None:
        """Repeat an operation in place on the shadows."""
        name = func.overloadpacket.__name__
        target = args[0] if args and isinstance(args[0], torch.Tensor) else named.get("out")
        if not isinstance(target, torch.Tensor):
            raise UnsupportedError(f"{name} writes to several tensors")
        if not target.is_floating_point():
            if decided:
                self._note_decided([target])
            return
        if name == "copy_" and isinstance(args[1], torch.Tensor) and args[1].is_floating_point():
            source = args[1]
            pair = _rounded(self.value(source), self.exact(source), source.dtype, target.dtype)
            for shadow, values in zip((self.value(target), self.exact(target)), pair, strict=True):
                shadow.copy_(values)
            return
        self._compute(func, args, named, self.value)
        if name in MOVES:
            self._compute(func, args, named, self.exact)
        else:
            self.exact(target).copy_(self.value(target))

    def _keep(self, native: torch.Tensor, wide: torch.Tensor, unrounded: torch.Tensor) -> None:
        storage = native.untyped_storage()
        count = storage.nbytes() // native.element_size()
        buffers = [torch.zeros(count, dtype=torch.float64, device=native.device) for _ in range(2)]
        for buffer, values in zip(buffers, (wide, unrounded), strict=True):
            buffer.as_strided(native.size(), native.stride(), native.storage_offset()).copy_(values)
        self._kept[_key(native)] = (StorageWeakRef(storage), native.dtype, buffers[0], buffers[1])


def run(mode: str, function: Callable[..., Any], inputs: Sequence[Any], entries: Callable[[Any], Any]) -> Any:
    """Call a function in another arithmetic, `mode`; returns (name, value) pairs.

    FLOAT64: floating-point outputs as if every step were computed in float64; integers that rounding may have
    decided are None. OTHER_TIES: the same, with equal values sorted in the other order. OTHER_ORDER: in the
    function's own dtypes, with sums in another order. `entries` splits what the function returns into such pairs.
    Raises UnsupportedError: a step has no float64 counterpart.
    """
    if mode == OTHER_ORDER:
        with torch.no_grad(), OtherOrder():
            return entries(function(*inputs))
    shadows = Float64(WITH_OTHER_TIES if mode == OTHER_TIES else {})
    with torch.no_grad(), shadows:
        returned = entries(function(*inputs))

    def shadow(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point():
            return shadows.exact(value).clone()
        return None if shadows.decided(value) else value

    return [(name, shadow(value)) for name, value in returned]


def _rounded(
    value: torch.Tensor, exact: torch.Tensor, source: torch.dtype, target: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shadow after a cast between dtypes, and without its rounding; a cast to a wider dtype rounds nothing."""
    if source == target:
        return value, exact
    one, other = torch.finfo(source), torch.finfo(target)
    narrows = other.eps > one.eps or other.max < one.max
    return (value.to(target).to(torch.float64), value) if narrows else (value, value)


def _check(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise UnsupportedError for what float64 can not follow: random draws and complex numbers."""
    if name in RANDOM:
        raise UnsupportedError(f"{name} draws at random")
    if any(one.is_complex() for one in tensors):
        raise UnsupportedError("complex numbers are used")


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in tree_flatten(value)[0] if isinstance(one, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class OtherOrder(PlainMode):
    """A dispatch mode that computes as the code says but sums backwards: so much may any right order lose.

    A float32 value that is then rounded to 16 bits takes the other neighbour if it lies so near the middle that
    the order of a sum decides. That is one step of the narrow dtype, thousands of times the float32 error, and a
    given other order need not happen to show it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        backwards = BACKWARDS.get(func)
        named = kwargs or {}
        if func is aten._to_copy.default and args[0].dtype is torch.float32 and named.get("dtype") in NARROW:
            found = rounded = func(*args, **named)
            for side in (1 + ORDER_DECIDES, 1 - ORDER_DECIDES):
                other = (args[0] * side).to(rounded.dtype)
                found = torch.where((other.float() != rounded.float()) & other.isfinite(), other, found)
            return found
        return func(*args, **named) if backwards is None else backwards(func, *args, **named)


def _products(func: Any, *args: Any, **named: Any) -> Any:
    *first, left, right = args
    return func(*first, left.flip(-1), right.flip(-2), **named)


def _sums(func: Any, value: torch.Tensor, *rest: Any, **named: Any) -> Any:
    dims = rest[0] if rest else None
    over = [dims] if isinstance(dims, int) else list(dims or range(value.dim()))
    return func(value.flip(over), *rest, **named)


def _along(func: Any, value: torch.Tensor, dim: int, *rest: Any, **named: Any) -> Any:
    return func(value.flip(dim), dim, *rest, **named).flip(dim)


BACKWARDS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default), _products),
    **dict.fromkeys((aten.sum.default, aten.mean.default, aten.sum.dim_IntList, aten.mean.dim), _sums),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _along),
    aten.logsumexp.default: _sums,
}


def _sorted(value: torch.Tensor, dim: int = -1, descending: bool = False) -> Any:  # noqa: FBT001, FBT002 - torch's
    if not value.dim():
        return aten.sort.default(value, dim, descending)
    values, places = torch.sort(value.flip(dim), dim=dim, descending=descending, stable=True)
    return values, value.size(dim) - 1 - places


def _stably_sorted(value: torch.Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
    """`torch.sort` with its argument `stable`."""
    if stable:
        return aten.sort.stable(value, stable=True, dim=dim, descending=descending)
    return _sorted(value, dim, descending)


def _topk(value: torch.Tensor, k: int, dim: int = -1, largest: bool = True, *rest: Any) -> Any:  # noqa: FBT001, FBT002
    if not value.dim():
        return aten.topk.default(value, k, dim, largest, *rest)
    return tuple(one.narrow(dim, 0, k).contiguous() for one in _sorted(value, dim, largest))


WITH_OTHER_TIES: Mapping[Any, Callable[..., Any]] = {
    aten.sort.default: _sorted,
    aten.sort.stable: _stably_sorted,
    aten.topk.default: _topk,
}
