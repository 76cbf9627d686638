"""The trusted half of running a stranger's reference: draws the inputs, and makes outputs of what came back.

It runs in a process that the reference's code can not reach. What it says of a call it has measured itself, in
files: whether inputs were changed, a second run gave the same bits, or an answer was remembered.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from traceproof.dataset.definition import Definition
from traceproof.digests import digest_json
from traceproof.execution.bits import same_bits
from traceproof.execution.device import BETWEEN_BYTES, giving_back, wait_asleep
from traceproof.execution.inputs import drawing_device, draws_much, fingerprints, make_inputs
from traceproof.execution.transfer import Sent, Transfer
from traceproof.ops import registry as ops
from traceproof.ops.base import Values
from traceproof.ops.cases import Case
from traceproof.ops.generic import GenericOp
from traceproof.store import OUT_OF_SPACE, load_tensors
from traceproof.untrusted.border import BorderError, plain_text

HELD_BYTES = 512 << 20  # of a GPU's memory that hold the inputs of the call before
DRAWING_THREADS = 4  # for inputs that take one thread more than a moment


def setup(payload: dict[str, Any], scratch: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Called once in a worker; the result draws (`do: draw`) or collects (`do: collect`) for one case per call.

    Args:
        payload: `definition` (JSON), `dataset` (root of the blobs, or null), `folder` (the stranger's scratch),
            `device` (where inputs that take a CPU long are drawn), `runs_on` (where the reference gets them).
        scratch: where finished outputs are left, as `<key>.safetensors`.
    """
    torch.set_num_threads(1)
    definition = Definition.model_validate(payload["definition"])
    dataset = Path(payload["dataset"]) if payload["dataset"] else None
    device = torch.device(payload["device"])
    op, _ = ops.for_definition(definition)
    transfer = Transfer(definition, op, Path(payload["folder"]), on_gpu=payload["runs_on"] != "cpu")
    measure = Measure(transfer, dataset, scratch, device=device)
    actions = {"draw": measure.draw, "collect": measure.collect}

    def handle(item: dict[str, Any]) -> dict[str, Any]:
        try:
            with giving_back(BETWEEN_BYTES):
                return actions[item["do"]](item)
        except BorderError as error:
            return {"bad": plain_text(str(error))}
        except OSError as error:
            if error.errno not in OUT_OF_SPACE:
                raise
            return {"no_space": str(error)}

    return handle


class Measure:
    """One definition's inputs and outputs."""

    def __init__(self, transfer: Transfer, dataset: Path | None, scratch: Path, *, device: torch.device) -> None:
        self.transfer, self.dataset, self.scratch, self.device = transfer, dataset, scratch, device
        self.definition, self.op = transfer.definition, transfer.op
        self._sent: Sent | None = None
        # The call that `remembered` is held against.
        self._before: tuple[Values, Mapping[str, torch.Tensor]] | None = None

    def draw(self, item: dict[str, Any]) -> dict[str, Any]:
        """Draw inputs into a file for the worker (`case`, `data`); gives their digest and what they are."""
        self._sent = None
        case = Case(**item["case"])
        device = drawing_device(self.definition, case, self.device)
        wait_asleep(device)
        torch.set_num_threads(DRAWING_THREADS if draws_much(self.definition, case) else 1)
        drawn = make_inputs(self.op, self.definition, case, device=device, dataset=self.dataset)
        digest = digest_json(fingerprints(drawn))
        self._sent = self.transfer.send(drawn, item["data"])
        return {"digest": digest, "inputs": self._sent.specs}

    def collect(self, item: dict[str, Any]) -> dict[str, Any]:
        """Take what a call left; gives what it did.

        Of the item, `key`, `case`, `data`, `out` and `returned` say where it lies and what it is; `first`: outputs
        of the same case, to be met bit by bit, or null; `recall`: whether to hold the outputs against those of the
        call before; `held`: whether the next call's will be held against these; `beside`: what they are called
        beside the outputs of that key, taken before, or empty.
        """
        if self._sent is None:
            raise BorderError("no inputs were drawn for it")
        case, values = Case(**item["case"]), self._sent.values
        taken = self.transfer.take(self._sent, item["returned"], case, data=item["data"], out=item["out"])
        if item["beside"]:
            self._put_beside(item["key"], item["beside"], taken.outputs)
            return {}
        facts: dict[str, Any] = {**taken.facts}
        outputs = taken.outputs
        if item["first"] is not None:
            kept = load_tensors(Path(item["first"]))
            first = {name: value for name, value in kept.items() if name in self.definition.outputs}
            facts["varying"] = sorted(
                name for name in first.keys() | outputs.keys() if not same_bits(first.get(name), outputs.get(name))
            )
        if item["recall"]:
            facts["remembered"] = self._remembered(values, outputs)
        self._before = (_held(values), outputs) if item["held"] else None
        self._save(item["key"], outputs)
        return facts

    def _save(self, key: str, outputs: Mapping[str, torch.Tensor]) -> None:
        target = self.scratch / f"{key}.safetensors"
        target.unlink(missing_ok=True)
        save_file(dict(outputs), target)
        target.chmod(0o600)

    def _put_beside(self, key: str, beside: str, outputs: Mapping[str, torch.Tensor]) -> None:
        """Add a call's outputs to those of another, under names of their own."""
        kept = {name: value.clone() for name, value in load_tensors(self.scratch / f"{key}.safetensors").items()}
        self._save(key, kept | {f"{name}@{beside}": value for name, value in outputs.items()})

    def _remembered(self, values: Values, outputs: Mapping[str, torch.Tensor]) -> bool:
        """Whether every output has the bits of the call before, whose inputs were others."""
        if self._before is None:
            return False
        earlier, before = self._before
        if isinstance(self.op, GenericOp) and not any(map(_varies, outputs.values())):
            return False  # nothing says that inputs such as these have different answers
        same = bool(outputs) and all(same_bits(value, before.get(name)) for name, value in outputs.items())
        return same and self.op.tells_apart(self.definition, _on_host(values), _on_host(earlier))


def _held(values: Values) -> Values:
    """Inputs to keep until the next call is measured: where they lie, but for much that lies on a GPU."""
    count = sum(value.nbytes for value in values.values() if isinstance(value, torch.Tensor) and value.is_cuda)
    return _on_host(values) if count > HELD_BYTES else values


def _on_host(values: Values) -> Values:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def _varies(value: torch.Tensor) -> bool:
    """Whether a tensor has two elements that differ."""
    flat = value.reshape(-1)
    return len(flat) > 1 and not same_bits(flat[1:], flat[:-1])
