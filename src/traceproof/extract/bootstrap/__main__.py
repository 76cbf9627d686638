"""`python -m traceproof.extract.bootstrap`: readings of config.json files, or the list of architectures, as JSON.

SGLang is imported once; each reading is made in a fork of that process, since laying out a model changes it.
SGLang prints to stdout, so answers go to files: the reading, or {"error": {...}}.

SGLang imports packages that laying out a model never needs. The real ones would cost gigabytes (torchvision brings
its own torch and CUDA) or do not exist for a CPU, so they are replaced by stubs. Any other missing package still
raises ImportError.
"""

import argparse
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from traceproof.extract.bootstrap import SUPPORTED, base_version, sglang_model, transformers_model
from traceproof.lazy import StandIns

PACKED = ("linear", "experts")  # kinds of modules whose weights may be packed in a checkpoint


class Refused(Exception):  # noqa: N818 - an answer, not a fault
    """A reading can not be made; `answer` says why."""

    def __init__(self, reason: str, **details: Any) -> None:  # noqa: ANN401 - JSON
        super().__init__(reason)
        self.answer = {"reason": reason, **details}


def main(arguments: list[str] | None = None) -> int:
    """Write an answer per job; returns the exit status."""
    parser = argparse.ArgumentParser(prog="traceproof.extract.bootstrap")
    parser.add_argument("--out", type=Path, required=True, help="folder of the answers, <number of the job>.json")
    parser.add_argument(
        "--jobs", type=Path, required=True, help="JSON: a list of {config, tp, ep}; a null: list models"
    )
    parser.add_argument("--workers", type=int, default=1, help="readings side by side")
    parser.add_argument("--seconds", type=float, default=300.0, help="that a reading may take")
    options = parser.parse_args(arguments)
    jobs = json.loads(options.jobs.read_text(encoding="utf-8"))
    install()
    try:
        version: str = importlib.import_module("sglang.version").__version__
        known = base_version(version) in SUPPORTED
        refusal: dict[str, Any] = {"reason": "unsupported version", "value": version, "allowed": list(SUPPORTED)}
    except ImportError as error:
        known, refusal = False, {"reason": "no sglang", "message": str(error)}
    if not known:
        for number in range(len(jobs)):
            _answer(options.out, number, {"error": refusal})
        return 0
    sglang_model.prepare()  # before the forks
    torch.set_num_threads(1)

    def answer_job(number: int) -> None:
        job = jobs[number]
        try:
            answer = read(job, version) if job is not None else listing(version)
        except Refused as refused:
            answer = {"error": refused.answer}
        _answer(options.out, number, answer)

    for number, how in forked(answer_job, len(jobs), workers=options.workers, seconds=options.seconds):
        if not (options.out / f"{number}.json").exists():
            _answer(options.out, number, {"error": {"reason": "died", "message": how}})
    return 0


def _answer(folder: Path, number: int, answer: dict[str, Any]) -> None:
    partial = folder / f"{number}.partial"
    partial.write_text(json.dumps(answer) + "\n", encoding="utf-8")
    partial.replace(folder / f"{number}.json")


def listing(version: str) -> dict[str, Any]:
    """The architectures that can be read, and transformers' default configs of language models."""
    defaults, without = transformers_model.defaults()
    return {
        "sglang": version,
        "architectures": sglang_model.architectures(),
        "defaults": defaults,
        "without_defaults": without,
    }


def read(job: Mapping[str, Any], version: str) -> dict[str, Any]:
    """SGLang's and transformers' reading of a job's config.json, as JSON. Raises Refused: SGLang refuses it."""
    started = time.monotonic()
    config = job["config"]
    world = {name: job.get(name, 1) for name in ("tp", "ep", "dp")}
    named, known = (config.get("architectures") or [None])[0], sglang_model.architectures()
    if named not in known:
        raise Refused("unknown architecture", value=named, allowed=known, version=version)
    with tempfile.TemporaryDirectory(prefix="traceproof-extract-") as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            model, packed = _packed_or_plain(Path(folder), config, world)
            modules, loads = sglang_model.describe(model), sglang_model.loading(model)
        except Exception as error:  # SGLang's exception is the answer, with its place
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno} in {place.name}"
            raise Refused("not accepted", message=f"{type(error).__name__}: {error}", where=where) from error
        architecture = type(model).__name__
        del model
    for module in modules if packed else ():
        if module["kind"] in PACKED:
            module["facts"]["scheme"] = packed.partition(":")[0]
    torch.set_default_dtype(torch.float32)  # SGLang changed it
    try:
        second = transformers_model.read(config)
    except transformers_model.Absent as absent:
        second = {"absent": str(absent)}
    except Exception as error:  # noqa: BLE001 - without a second reading nothing is written, and this is told
        second = {"absent": f"transformers' model cannot be read: {type(error).__name__}: {error}"[:300]}
    versions = {name: importlib.import_module(name).__version__ for name in ("transformers", "torch")}
    return {
        "sglang": version,
        **versions,
        "architecture": architecture,
        **world,
        "experts": "routed only",
        "loads": loads,
        "unpacked": packed,
        "modules": modules,
        "second": second,
        "seconds": round(time.monotonic() - started, 2),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def _packed_or_plain(folder: Path, config: Mapping[str, Any], world: Mapping[str, int]) -> tuple[nn.Module, str]:
    """SGLang's model and ""; if it refuses `quantization_config`, the model without, and its method and why."""
    try:
        return _built(folder, world), ""
    except Exception as error:
        if "quantization_config" not in config:
            raise
        plain = {name: value for name, value in config.items() if name != "quantization_config"}
        again = folder / "unpacked"  # a new folder, since SGLang caches what it reads
        again.mkdir()
        (again / "config.json").write_text(json.dumps(plain), encoding="utf-8")
        try:
            model = _built(again, world)
        except Exception:  # noqa: BLE001 - the packing is not what SGLang refuses
            raise error from None
        return model, f"{config['quantization_config'].get('quant_method')}: {type(error).__name__}: {error}"[:300]


def _built(folder: Path, world: Mapping[str, int]) -> nn.Module:
    """SGLang's model. Some models refuse one attention backend, some another; the shapes are the same."""
    first, *others = sglang_model.BACKENDS
    try:
        return sglang_model.build_model(folder, **world, backend=first)
    except AssertionError as error:
        if "attention backend" not in str(error):
            raise
    return sglang_model.build_model(folder, **world, backend=others[0])


STUBBED = ("torchvision", "vllm", "IPython")


class _Anything(type):
    """A class whose attributes are all the class itself, so that module-level uses of a stub's names succeed."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Anything(metaclass=_Anything):
    """Stands for any name that is imported from a stub."""

    def __init__(self, *_args: object, **_options: object) -> None:
        """Accept any arguments."""


def install() -> None:
    """Put the stubs last on the import path, so that installed packages win.

    transformers checks for torchvision before, or it would take the stub for the package.
    """
    importlib.import_module("transformers.utils.import_utils").is_torchvision_available()
    StandIns(STUBBED, lambda _: Anything).install()


PAUSE = 0.02  # seconds between checks of the forks


def forked(job: Callable[[int], None], count: int, *, workers: int, seconds: float) -> Iterator[tuple[int, str]]:
    """Run `job` for 0 to `count` - 1, each in a fork; yields (number, how it ended). Killed after `seconds`."""
    running: dict[int, tuple[int, float]] = {}
    waiting = list(range(count))
    while waiting or running:
        while waiting and len(running) < workers:
            number = waiting.pop(0)
            process = os.fork()
            if not process:
                try:
                    job(number)
                except BaseException:  # noqa: BLE001 - the fork ends here; its answer will be missing
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            running[process] = (number, time.monotonic() + seconds)
        time.sleep(PAUSE)
        for process, (number, until) in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended and time.monotonic() > until:
                os.kill(process, signal.SIGKILL)
                _, status = os.waitpid(process, 0)
                ended = process
            if ended:
                del running[process]
                late = f"did not finish in {seconds:.0f} s" if time.monotonic() > until else ""
                yield number, late or f"exit status {os.waitstatus_to_exitcode(status)}"


if __name__ == "__main__":
    sys.exit(main())
