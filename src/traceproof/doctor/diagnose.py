"""The whole diagnosis of a machine, for one configuration."""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import traceproof
from traceproof.config.schema import Config
from traceproof.doctor import environments, isolation, machine, reach, remedies
from traceproof.doctor.ask import stop
from traceproof.doctor.model import Diagnosis, Driver, StackFound
from traceproof.environments.building import has_driver, resolve
from traceproof.stacks import MAIN, STACK_OF, STACKS, TRUTHS, distribution


def diagnose(config: Config, *, root: Path, seconds: float) -> Diagnosis:
    """Look and ask, all of it side by side; nothing is built or changed. Imports of a stack have `seconds`."""
    with ThreadPoolExecutor() as threads:
        asked_stacks = threads.submit(environments.examine, config, root=root, seconds=seconds)
        asked_layers = threads.submit(isolation.layers, gpu=has_driver())
        asked_driver = threads.submit(machine.driver)
        torch = str(root / resolve(config, MAIN).python)
        asked_reach = threads.submit(reach.asked, torch, root=root, seconds=seconds)
        try:
            compiler = machine.host_compiler()
            driver, layers, stacks = asked_driver.result(), asked_layers.result(), asked_stacks.result()
            told = asked_reach.result()
        except BaseException:  # an interrupt, say: the threads end when what they wait for does
            stop()
            raise
    memory = machine.memory(config.limits.memory_gb)
    disk = machine.disk(root / config.results, missing=environments.missing_gb(stacks))
    problems = [
        *remedies.of_stacks(stacks, root=root),
        *remedies.of_sources(config, root=root),
        *remedies.of_gpu(driver, stacks, compiler),
        *remedies.of_room(memory, disk, root=root),
        *filter(None, [isolation.problem(layers)]),
    ]
    return Diagnosis(
        traceproof=traceproof.__version__,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        driver=driver,
        host_compiler=compiler,
        memory=memory,
        disk=disk,
        isolation=layers,
        stacks=stacks,
        proves=proves(config, driver, stacks),
        reach=reach.here(told, {gpu.sm for gpu in driver.gpus}, _able(config, stacks)),
        problems=tuple(problems),
        able=not any(problem.fatal for problem in problems),
    )


def proves(config: Config, driver: Driver, stacks: tuple[StackFound, ...]) -> str:
    """What references are held against here, in one sentence."""
    by_name = {one.name: one for one in stacks}
    if by_name[MAIN].state != "ready":
        return "nothing before the torch stack can be used"
    stacks_of_truths = dict.fromkeys(STACK_OF[truth] for truth in TRUTHS if truth in config.truths)
    able = [by_name[stack] for stack in stacks_of_truths if by_name[stack].state == "ready"]
    where = "on the CPU"
    if driver.gpus:
        where = f"on SM {', '.join(sorted({gpu.sm for gpu in driver.gpus}))}"
    against = ["the float64 oracle", *map(_called, able)]
    text = (
        f"{where}, references against {', '.join(against[:-1])}{' and ' if len(against) > 1 else ''}{against[-1]}"
    )
    rest = [STACKS[stack].label for stack in stacks_of_truths if by_name[stack].state == "needs a GPU"]
    return f"{text}; with an NVIDIA GPU {', '.join(rest)} too" if rest else text


def _able(config: Config, stacks: tuple[StackFound, ...]) -> set[str]:
    """The ground truths whose stacks can be used; none before torch can."""
    ready = {one.name for one in stacks if one.state == "ready"}
    return {truth for truth in config.truths if {MAIN, STACK_OF[truth]} <= ready}


def _called(stack: StackFound) -> str:
    version = stack.versions.get(distribution(stack.name), "")
    return f"{STACKS[stack.name].label} {version}".strip()
