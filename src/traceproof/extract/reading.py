"""A reading: SGLang's modules as the bootstrap wrote them down, and the call that makes one."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceproof.errors import TraceproofError
from traceproof.extract.catalogue import Parallel
from traceproof.stacks import READER, STACKS
from traceproof.untrusted.tokens import without_secrets

REFUSED = 3  # the bootstrap's exit status when its answer file says why
TIMEOUT = 300.0  # seconds; a reading takes 10 to 20, more means that SGLang waits for something


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the model; equal ones are one entry with a count.

    Attributes:
        path: with `*` for layer numbers; "" is the model itself.
        parent: the path of the module that holds it.
        parent_class: that module's class.
        class_name: SGLang's class.
        kind: norm, linear, attention, linear_attention, mamba, experts, top_k, rope, ..., or block.
        facts: per-rank shapes and constants; which ones depends on the kind.
        count: how often it occurs.
    """

    path: str
    parent: str | None
    parent_class: str | None
    class_name: str
    kind: str
    facts: Mapping[str, Any]
    count: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A model at one parallelism.

    Attributes:
        versions: of sglang, transformers and torch.
        architecture: SGLang's class of the model.
        experts: "routed only": SGLang may fuse shared experts into the routed ones where it launches on CUDA.
        seconds, peak_mb: what the reading cost.
    """

    versions: Mapping[str, str]
    architecture: str
    parallel: Parallel
    experts: str
    modules: tuple[Module, ...]
    seconds: float
    peak_mb: int

    @property
    def vocab(self) -> int:
        """Size of the vocabulary, as the embedding has it."""
        return int(self._embedding["vocab"])

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return int(self._embedding["hidden"])

    @property
    def _embedding(self) -> Mapping[str, Any]:
        for module in self.modules:
            if module.kind == "embedding":
                return module.facts
        raise TraceproofError(f"SGLang's {self.architecture} has no token embedding, so it is no language model")


def parse(answer: Mapping[str, Any]) -> Reading:
    """A reading out of the bootstrap's JSON."""
    names = ("path", "parent", "parent_class", "class", "kind", "facts", "count")
    modules = tuple(Module(*(item[name] for name in names)) for item in answer["modules"])
    return Reading(
        versions={name: answer[name] for name in (STACKS[READER].package, "transformers", "torch")},
        architecture=answer["architecture"],
        parallel=Parallel(answer["tp"], answer["ep"]),
        experts=answer["experts"],
        modules=modules,
        seconds=answer["seconds"],
        peak_mb=answer["peak_mb"],
    )


@dataclass(frozen=True, slots=True)
class Environment:
    """The interpreter that has SGLang, and a checkout to prefer over the SGLang installed in it."""

    python: Path
    sglang_path: Path | None = None

    def read(self, config: Mapping[str, Any], parallel: Parallel) -> Reading:
        """SGLang's reading of a config.json at one parallelism.

        Raises:
            TraceproofError: SGLang is absent or not supported, or does not accept the config.
        """
        with tempfile.TemporaryDirectory(prefix="traceproof-extract-") as folder:
            Path(folder, "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
            flags = ["--folder", folder, "--tp", str(parallel.tp), "--ep", str(parallel.ep)]
            return parse(self._answer(flags))

    def architectures(self) -> list[str]:
        """The architectures that this SGLang can read."""
        return list(self._answer([])["architectures"])

    def _answer(self, flags: list[str]) -> dict[str, Any]:
        if not self.python.exists():
            todo = "Build the extract environment first (envs/extract.txt), or give its interpreter."
            raise TraceproofError(f"there is no interpreter {self.python}", todo=todo)
        with tempfile.TemporaryDirectory(prefix="traceproof-answer-") as folder:
            out = Path(folder, "answer.json")
            command = [
                str(self.python),
                "-W",
                "ignore",
                "-m",
                "traceproof.extract.bootstrap",
                "--out",
                str(out),
                *flags,
            ]
            try:
                done = subprocess.run(
                    command, env=self._environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False
                )
            except subprocess.TimeoutExpired as expired:
                message = f"SGLang did not finish laying out the model in {TIMEOUT:.0f} s"
                raise TraceproofError(message, todo=f"Run it by hand: {' '.join(command)}") from expired
            if done.returncode not in (0, REFUSED) or not out.exists():
                tail = done.stderr.strip().splitlines()[-5:]
                todo = "This is a fault of the bootstrap or of the environment; the lines are its last words."
                raise TraceproofError(
                    f"the extract interpreter ended with {done.returncode}", problems=tail, todo=todo
                )
            answer: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        if "error" in answer:
            raise _refusal(answer["error"], self)
        return answer

    def _environment(self) -> dict[str, str]:
        source = Path(__file__).resolve().parents[2]
        path = [str(source)]
        if self.sglang_path is not None:
            inner = self.sglang_path / "python"  # a checkout keeps the package there; an unpacked wheel does not
            root = (inner if inner.is_dir() else self.sglang_path).resolve()
            if not (root / STACKS[READER].package).is_dir():
                raise TraceproofError(
                    f"no SGLang at {self.sglang_path}", todo="Give a checkout or an unpacked wheel."
                )
            path.insert(0, str(root))
        kept = {
            name: value for name, value in without_secrets().items() if not name.startswith(("SGLANG_", "PYTHON"))
        }
        return kept | {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def _refusal(error: Mapping[str, Any], environment: Environment) -> TraceproofError:
    match error["reason"]:
        case "no sglang":
            where = environment.sglang_path or environment.python
            return TraceproofError(f"no SGLang at {where}: {error['message']}", todo="Install envs/extract.txt.")
        case "unsupported version":
            allowed = ", ".join(error["allowed"])
            return TraceproofError(
                f"SGLang {error['value']} is not supported; supported: {allowed}",
                todo="Use a supported version, or add it to extract/bootstrap/versions.py with a golden reading.",
            )
        case "unknown architecture":
            known = ", ".join(_closest(str(error["value"]), error["allowed"]))
            return TraceproofError(
                f"architectures: SGLang {error['version']} knows no {error['value']!r}; closest: {known}",
                todo=f"`--list` names all {len(error['allowed'])} that it knows.",
            )
        case _:
            return TraceproofError(
                "SGLang does not accept this config.json",
                problems=[error["message"], f"raised at {error['where']}"],
                todo="Check the field that the message names.",
            )


def _closest(name: str, known: list[str]) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(name, known, n=4, cutoff=0.0)
