"""A copy of this repository in which a test may edit code, configuration and definitions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("Snakefile", "config.yaml", "rules", "scripts", "envs", "profiles", "src", "sources.lock", "noxfile.py")
HIDING = "no clusters"  # folder of modules that stand before Snakemake's plugins of these names
PROGRAMS = "nox, pydantic, snakemake.cli, typer"  # whose imports take up to a second
CLUSTERS = ("kubernetes", "slurm", "slurm_jobstep")
DEFINITIONS = ROOT / "tests" / "dataset" / "definitions"


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command left.

    Attributes:
        code: its exit code.
        out: what it printed, stdout and stderr together.
    """

    code: int
    out: str

    @classmethod
    def of(cls, *command: str, cwd: Path, env: Mapping[str, str]) -> Ran:
        """Run a command."""
        both, pipe = subprocess.STDOUT, subprocess.PIPE
        done = subprocess.run(command, cwd=cwd, env=env, check=False, text=True, stdout=pipe, stderr=both)
        return cls(done.returncode, done.stdout)

    @property
    def jobs(self) -> list[str]:
        """The jobs that were run or, in a dry run, would be, e.g. `verify rmsnorm`."""
        finished = [line.rpartition(" s  ")[2] for line in self.out.splitlines() if line.startswith("[")]
        planned = [line[10:].partition(":")[0] for line in self.out.splitlines() if line.startswith("would run ")]
        return finished + planned


@dataclass(slots=True)
class Repository:
    """The copy; commands run in it with its own code.

    Attributes:
        root: its folder.
        executors: whether its Snakemake finds the plugins of clusters; importing one takes up to half a second.
    """

    root: Path
    executors: bool = False

    @classmethod
    def copy(cls, root: Path, *, python: str = sys.executable, **config: Any) -> Repository:  # noqa: ANN401 - JSON
        """Copy what runs to `root` and change keys of its config.yaml; torch runs in this very interpreter.

        `python`: another one, such as `forked.interpreter()`, which need not import torch for every job.
        """
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, root / part)  # compiled modules too: they go by the sources' times
            else:
                shutil.copy2(source, root / part)
        (root / HIDING).mkdir()
        for name in CLUSTERS:
            (root / HIDING / f"snakemake_executor_plugin_{name}.py").touch()  # no package, so no plugin
        yaml = YAML(typ="safe")
        raw = yaml.load((root / "config.yaml").read_text())
        raw["stacks"]["torch"] = {"env": "cpu", "python": python}
        raw |= {"known": None, "truths": [], "test_sizes": ["small"]} | config
        with (root / "config.yaml").open("w") as file:
            yaml.dump(raw, file)
        return cls(root)

    def again(self, root: Path) -> Repository:
        """A copy of this one as it stands, at `root`: what is finished is finished there, too."""
        shutil.copytree(self.root, root, symlinks=True)
        return Repository(root)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its commands."""
        path = [self.root / "src"] if self.executors else [self.root / "src", self.root / HIDING]
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
        found["PYTHONDONTWRITEBYTECODE"] = ""  # a copy runs often: compiled modules are a tenth of a run
        return found

    def run(self, *command: str) -> Ran:
        """Run a Python module of the copy."""
        done = forked.run(*command, cwd=self.root, env=self.environment, having=PROGRAMS)
        return Ran(done.returncode, done.stdout)

    def verify(self, *options: str) -> Ran:
        """Run `traceproof verify`."""
        return self.run("traceproof", "verify", "--cores", "1", *options)

    def dry(self, *arguments: str) -> Ran:
        """Ask Snakemake what it would run."""
        return self.run("snakemake", "--cores", "1", "--dry-run", *arguments)

    def summary(self, folder: str = "results") -> dict[str, Any]:
        """A run's summary."""
        value: dict[str, Any] = json.loads((self.root / folder / "summary.json").read_text())
        return value

    def verdicts(self, folder: str = "results") -> dict[str, str]:
        """The worst verdict of each definition."""
        return {name: one["verdict"] for name, one in self.summary(folder)["definitions"].items()}

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace text that must be there."""
        file = self.root / path
        text = file.read_text()
        assert old in text, f"{path} does not hold {old!r}"
        file.write_text(text.replace(old, new))


@contextmanager
def changed(file: Path, old: str, new: str) -> Iterator[None]:
    """Replace text in a file for a while; `old` must be there."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    try:
        yield
    finally:
        file.write_text(text)


def own_dataset(folder: Path, *names: str) -> Path:
    """A dataset folder with some of our own definitions, given as `<op_type>/<name>`."""
    for name in names:
        target = folder / "definitions" / f"{name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(DEFINITIONS / f"{name}.json", target)
    return folder
