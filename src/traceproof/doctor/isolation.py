"""Layers of isolation that this kernel offers: `python -m traceproof.doctor.isolation FOLDER [WITHOUT ...]`."""

import json
import os
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from traceproof.doctor.ask import ask
from traceproof.doctor.model import Layer, Problem
from traceproof.sandbox.isolation import ABSENT, CUDA_REFUSES, HOLDS, LAYERS, probe

SECONDS = 30.0
BESIDE_A_GPU = "left out where there is a GPU, since CUDA does not start behind it"
NETWORK, FILES = ("network", "system_calls"), ("files", "landlock")  # either of each keeps it out
# Settings that forbid namespaces to ordinary users: the file, what it holds then, what allows them.
SETTINGS = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
)
SYSCTL = Path("/proc/sys")


def layers(*, gpu: bool) -> tuple[Layer, ...]:
    """Every layer, each tried in a process of its own; with a GPU, those that references are run behind then."""
    without = CUDA_REFUSES if gpu else ()
    with tempfile.TemporaryDirectory(prefix="traceproof-doctor-") as folder:
        command = [sys.executable, "-P", "-m", __name__, folder, *without]
        source = str(Path(__file__).resolve().parents[2])
        answer = ask(command, seconds=SECONDS, environment={**os.environ, "PYTHONPATH": source})
    states: dict[str, str] = {}
    if not answer.problem:
        states = json.loads(answer.out.splitlines()[-1])
    unknown = f"{ABSENT}not tried: {answer.problem}"
    found = []
    for name, text in LAYERS.items():
        state = states.get(name, unknown)
        holds = state == HOLDS
        found.append(Layer(name=name, text=text, holds=holds, why="" if holds else _reason(name, state, without)))
    return tuple(found)


def _reason(name: str, state: str, without: Collection[str]) -> str:
    return BESIDE_A_GPU if name in without else state.removeprefix(ABSENT)


def problem(found: tuple[Layer, ...]) -> Problem | None:
    """What strangers' code could reach here, and the setting that keeps the layers away."""
    holds = {layer.name for layer in found if layer.holds}
    reached = []
    if not holds & set(NETWORK):
        reached.append("reach the network")
    if not holds & set(FILES):
        reached.append("read and write this user's files")
    if not reached:
        return None
    return Problem(
        what=f"references, which are code of strangers, could {' and '.join(reached)}",
        command=next(filter(None, map(_sysctl, SETTINGS)), ""),
        todo="Run datasets that you trust, or allow unprivileged user namespaces.",
        fatal=False,
    )


def _sysctl(setting: tuple[str, str, str]) -> str:
    place, forbids, allows = setting
    try:
        value = (SYSCTL / place).read_text(encoding="ascii").strip()
    except OSError:
        return ""
    return f"sudo sysctl -w {allows}" if value == forbids else ""


if __name__ == "__main__":
    stage = Path(sys.argv[1]) / "root"
    stage.mkdir()
    sys.stdout.write(json.dumps(probe(str(stage), sys.argv[2:])[1]) + "\n")
