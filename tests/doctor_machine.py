"""A machine that lacks things: drivers, compilers, interpreters and packages are made for a test."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from repository import ROOT

from traceproof.config import Config
from traceproof.doctor.diagnosis import diagnose
from traceproof.doctor.model import Diagnosis, Layer
from traceproof.environments import building as environments
from traceproof.environments.building import PINS

TORCH = """
class version:
    cuda = {cuda!r}

class cuda:
    @staticmethod
    def init():
        {init}
"""


SMI = "0, NVIDIA H200, 9.0, 143771, 580.159.04"


HOLDS = tuple(Layer(name=name, text=name, holds=True) for name in ("network", "files"))


def program(path: Path, text: str) -> Path:
    """A shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


class Machine:
    """A repository's folder, and a PATH, on a machine of which everything else is made up.

    Args:
        root: an empty folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / "bin"
        self.path.mkdir()
        self.packages = root / "packages"
        (root / "src").symlink_to(ROOT / "src")
        (root / PINS).symlink_to(ROOT / PINS)
        self.package("torch", TORCH.format(cuda=None, init="pass"))
        program(self.path / "g++", "echo g++ 13.2")

    def package(self, name: str, text: str, *, distribution: str = "", version: str = "") -> None:
        """A package that every interpreter here finds first."""
        folder = self.packages / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(text)
        if distribution:
            about = self.packages / f"{distribution.replace('-', '_')}-{version}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")

    def python(self, path: Path) -> Path:
        """An interpreter."""
        return program(path, f'PYTHONPATH={self.packages}:"$PYTHONPATH" exec {sys.executable} "$@"')

    def environment(self, name: str, *, pins: str | None = "") -> None:
        """A built environment; `pins` other than those there now, or None: no stamp."""
        folder = self.root / ".venvs" / name
        self.python(folder / "bin" / "python")
        if pins is not None:
            stamp = {"environment": name, "pins": pins or environments._pins(self.root, name)}
            (folder / environments.WHOLE).write_text(json.dumps(stamp))

    def gpu(self) -> None:
        """A GPU: the driver's file, nvidia-smi, and a torch that finds it."""
        (self.root / "nvidiactl").touch()
        program(self.path / "nvidia-smi", f"echo '{SMI}'")
        self.package("torch", TORCH.format(cuda="13.0", init="pass"))

    def ask(self, **config: Any) -> Diagnosis:  # noqa: ANN401 - values of config.yaml
        """The diagnosis."""
        read = Config.model_validate({"dataset": "anywhere"} | config)
        return diagnose(read, root=self.root, seconds=30.0)
