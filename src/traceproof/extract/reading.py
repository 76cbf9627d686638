"""A reading: SGLang's modules as the bootstrap wrote them down, and the process that makes one."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from traceproof import programs
from traceproof.errors import TraceproofError
from traceproof.models.catalogue import Parallel
from traceproof.models.reading import ModelModule, Reading, Second, SeenModule
from traceproof.programs import without_secrets
from traceproof.stacks import READER, STACKS

START = 120.0  # until SGLang is imported
TIMEOUT = 300.0  # per reading, which takes 1 to 20 s, or else waits for something
READERS = 2  # at a time: each takes one core and up to 1 GB


def parse(answer: Mapping[str, Any]) -> Reading:
    """A reading, from the bootstrap's JSON."""
    second = answer.get("second", {})
    modules_seen = tuple(SeenModule(**item) for item in second.get("modules", ()))
    return Reading(
        versions={name: answer[name] for name in (STACKS[READER].package, "transformers", "torch")},
        parallel=Parallel(answer["tp"], answer["ep"], answer.get("dp", 1)),
        modules=tuple(ModelModule(**item | {"uses": tuple(item.get("uses", ()))}) for item in answer["modules"]),
        second=Second(modules_seen, second.get("absent") or second.get("problem") or ""),
        loads=tuple(answer.get("loads", ())),
        unpacked=answer.get("unpacked", ""),
        **{name: answer[name] for name in ("architecture", "experts", "seconds", "peak_mb")},
    )


class Listing(NamedTuple):
    """What the installed SGLang can read, and transformers' causal language models by `model_type`."""

    version: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Mapping[str, Any]]  # default configs
    without_defaults: Mapping[str, str]  # why there is no default config


@dataclass(frozen=True, slots=True)
class ReaderEnvironment:
    """An interpreter with SGLang, and a checkout that replaces the installed SGLang."""

    python: Path
    sglang_path: Path | None = None

    def read(self, config: Mapping[str, Any], parallel: Parallel) -> Reading:
        """SGLang's and transformers' reading of a config.json at one parallelism.

        Raises TraceproofError: SGLang is absent, not supported, or does not accept the config.
        """
        [reading] = self.read_all([(config, parallel)])
        if isinstance(reading, TraceproofError):
            raise reading
        return reading

    def read_all(self, jobs: Sequence[tuple[Mapping[str, Any], Parallel]]) -> list[Reading | TraceproofError]:
        """Readings of several jobs, with SGLang started once; a job that SGLang refuses gives an error instead.

        Raises TraceproofError: SGLang can not be started.
        """
        requests = [{"config": dict(config), **at._asdict()} for config, at in jobs]
        return [
            _refusal(answer["error"], self) if "error" in answer else parse(answer)
            for answer in self._answers(requests)
        ]

    def listing(self) -> Listing:
        """The architectures that this SGLang can read, and transformers' default configs of language models.

        Raises TraceproofError: SGLang can not be started.
        """
        [answer] = self._answers([None])
        if "error" in answer:
            raise _refusal(answer["error"], self)
        names = tuple(answer["architectures"])
        return Listing(answer[STACKS[READER].package], names, answer["defaults"], answer["without_defaults"])

    def _answers(self, jobs: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
        """SGLang's answers to jobs, from processes of its environment."""
        if not self.python.exists():
            todo = "Build the extract environment first (envs/extract.txt), or give its interpreter."
            raise TraceproofError(f"there is no interpreter {self.python}", todo=todo)
        workers = min(READERS, os.cpu_count() or 1)
        with tempfile.TemporaryDirectory(prefix="traceproof-answer-") as folder:
            out, file = Path(folder), Path(folder, "jobs")
            file.write_text(json.dumps(jobs), encoding="utf-8")
            command = [str(self.python), "-W", "ignore", "-m", "traceproof.extract.bootstrap"]
            command += ["--jobs", str(file), "--out", folder, "--workers", str(workers), "--seconds", str(TIMEOUT)]
            limit = START + TIMEOUT * -(-len(jobs) // workers)
            try:
                done = programs.run(command, environment=self._environment(), seconds=limit)
            except subprocess.TimeoutExpired as expired:
                message = f"SGLang did not finish laying out {len(jobs)} models in {limit:.0f} s"
                raise TraceproofError(message, todo=f"Run it by hand: {' '.join(command)}") from expired
            files = [out / f"{number}.json" for number in range(len(jobs))]
            if done.returncode or not all(path.exists() for path in files):
                what = f"the extract interpreter ended with {done.returncode}"
                todo = "This is a fault of the bootstrap or of the environment; the lines are its last words."
                raise TraceproofError(what, problems=done.stderr.strip().splitlines()[-5:], todo=todo)
            return [json.loads(path.read_text(encoding="utf-8")) for path in files]

    def _environment(self) -> dict[str, str]:
        """Environment variables for reading SGLang, on the CPU and without network."""
        source = Path(__file__).resolve().parents[2]
        path = [str(source)]
        if self.sglang_path is not None:
            inner = self.sglang_path / "python"  # the package's place in a checkout; not in an unpacked wheel
            root = (inner if inner.is_dir() else self.sglang_path).resolve()
            if not (root / STACKS[READER].package).is_dir():
                todo = "Give a checkout or an unpacked wheel."
                raise TraceproofError(f"no SGLang at {self.sglang_path}", todo=todo)
            path.insert(0, str(root))
        prefixes = ("SGLANG_", "PYTHON")
        kept = {name: value for name, value in without_secrets().items() if not name.startswith(prefixes)}
        return kept | {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


def _refusal(error: Mapping[str, Any], environment: ReaderEnvironment) -> TraceproofError:
    """The error for the user, for a reason that SGLang's environment reports."""
    match error["reason"]:
        case "no sglang":
            what = f"no SGLang at {environment.sglang_path or environment.python}: {error['message']}"
            todo = "Install envs/extract.txt."
        case "unsupported version":
            what = f"SGLang {error['value']} is not supported; supported: {', '.join(error['allowed'])}"
            todo = "Use a supported version, or add it to extract/bootstrap/__init__.py with a golden reading."
        case "unknown architecture":
            known = ", ".join(get_close_matches(str(error["value"]), error["allowed"], n=4, cutoff=0.0))
            what = f"architectures: SGLang {error['version']} knows no {error['value']!r}; closest: {known}"
            todo = f"`--list` names all {len(error['allowed'])} that it knows."
        case "died":
            what = f"SGLang's process for this model ended without an answer: {error['message']}"
            todo = "Too little memory, or a fault of the bootstrap: read the model alone."
        case _:
            what, problems = "SGLang does not accept this config.json", [error["message"]]
            problems.append(f"raised at {error['where']}")
            return TraceproofError(what, problems=problems, todo="Check the field that the message names.")
    return TraceproofError(what, todo=todo)
