"""A diagnosis as one screen of text."""

import textwrap
from collections.abc import Iterator, Mapping

from traceproof.doctor.model import Diagnosis, Layer, Program, StackFound
from traceproof.stacks import MAIN, distribution

WIDTH = 100
LABEL = 13


def screen(found: Diagnosis) -> str:
    """All of it, the problems last."""
    lines = [f"traceproof {found.traceproof}, Python {found.python}, {found.system}, {found.cores} cores", ""]
    for label, text in _machine(found):
        lines += _line(label, text)
    lines.append("")
    for one in found.stacks:
        lines += _line(one.name, _stack(one))
    lines += ["", *_line("can prove", found.proves), *_reach(found.reach), ""]
    lines += _problems(found)
    return "\n".join(lines) + "\n"


def _line(label: str, text: str) -> list[str]:
    rest = " " * LABEL
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{label:{LABEL}}",
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _machine(found: Diagnosis) -> Iterator[tuple[str, str]]:
    driver = found.driver
    if not driver.present:
        yield "NVIDIA", "no driver"
    else:
        gpus = "; ".join(f"{gpu.index}: {gpu.name}, SM {gpu.sm}, {gpu.memory_gib:g} GiB" for gpu in driver.gpus)
        yield "NVIDIA", f"driver {driver.version or 'unknown'}; {gpus or driver.problem}"
        for one in found.stacks:
            if one.compiler is not None:
                yield "CUDA", f"{_program(one.compiler)} ({one.name})"
    yield "C++", _program(found.host_compiler)
    memory, disk = found.memory, found.disk
    yield "memory", f"{memory.total:g} GiB, {memory.available:g} free; one case may use {memory.limit:g}"
    missing = f"; about {disk.missing:g} GB are still to be installed" if disk.missing else ""
    yield "disk", f"{disk.free:g} GB free{missing}"
    yield "isolation", _isolation(found.isolation)


def _reach(reach: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Which op_types have a ground truth here, for some of their forms at least."""
    met = [op_type for op_type, truths in reach.items() if truths]
    alone = [op_type for op_type, truths in reach.items() if not truths]
    parts = [f"with a ground truth: {', '.join(met)}"] if met else []
    parts += [f"by the oracle alone: {', '.join(alone)}"] if alone and met else []
    return _line("", "; ".join(parts)) if parts else []


def _program(program: Program) -> str:
    if program.path is None:
        return f"none: {program.problem}"
    return f"{program.path}: {program.problem or program.version}"


def _isolation(layers: tuple[Layer, ...]) -> str:
    parts = []
    holds = [layer.text for layer in layers if layer.holds]
    if holds:
        parts.append(f"yes: {', '.join(holds)}")
    by_reason: dict[str, list[str]] = {}
    for layer in layers:
        if not layer.holds:
            by_reason.setdefault(layer.why, []).append(layer.text)
    parts += [f"no: {', '.join(names)} ({why})" for why, names in by_reason.items()]
    return "; ".join(parts)


def _stack(one: StackFound) -> str:
    where = f".venvs/{one.environment}" if one.environment is not None else one.python
    if one.state == "needs a GPU":
        return one.state
    names = dict.fromkeys([distribution(one.name), distribution(MAIN)])
    versions = ", ".join(f"{name} {one.versions[name]}" for name in names if name in one.versions)
    return f"{one.state}, {where}{f', {versions}' if versions else ''}"


def _problems(found: Diagnosis) -> Iterator[str]:
    if not found.problems:
        yield "Nothing is missing."
        return
    for problem in sorted(found.problems, key=lambda problem: not problem.fatal):
        yield from _line("missing" if problem.fatal else "note", problem.what)
        if problem.command:
            yield f"{'':{LABEL}}$ {problem.command}"
        elif problem.todo:
            yield from _line("", problem.todo)
