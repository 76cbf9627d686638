"""What comes before SGLang: supported versions, stand-ins for packages, forks that readings are made in.

SGLang imports packages at its top that laying out a model never needs. Real ones would cost gigabytes (torchvision
drags in its own torch and CUDA) or do not exist for a CPU. A package that is missing and not named here stays an
ImportError.
"""

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import MappingProxyType
from typing import Any

from packaging.version import InvalidVersion, Version

from traceproof.lazy import StandIns

# A version is added here only with a golden reading of its own in tests/extract_golden.
SUPPORTED: Mapping[str, str] = MappingProxyType({"0.5.22": "sglang_0_5_22", "0.5.23": "sglang_0_5_22"})


def base_version(version: str) -> str:
    """`0.5.23` of `0.5.23`, `0.5.23.post1`, `0.5.23+cpu`, `0.5.23.dev4`: the release a build belongs to."""
    try:
        return Version(version).base_version
    except InvalidVersion:
        return ""


STUBBED = ("torchvision", "vllm", "IPython")


class _Anything(type):
    """A class whose every attribute is itself, so that module-level uses of a stub's names succeed."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Anything(metaclass=_Anything):
    """Whatever a stub module is asked for."""

    def __init__(self, *_args: object, **_options: object) -> None:
        """Take anything."""


def install() -> None:
    """Put the stubs last on the import path: a package that is really there wins.

    transformers must have looked for torchvision before, or it would take the stub for the package.
    """
    import_module("transformers.utils.import_utils").is_torchvision_available()
    StandIns(STUBBED, lambda _: Anything).install()


@contextmanager
def towers_left_out() -> Iterator[None]:
    """Have an encoder that transformers can not make for want of a package become an empty module.

    SGLang and transformers both take some encoders of images and sound from `AutoModel`.
    """
    factory: Any = import_module("transformers").AutoModel
    original = factory.from_config

    def from_config(config: Any, **options: Any) -> Any:  # noqa: ANN401 - of transformers
        try:
            return original(config, **options)
        except ImportError:
            return import_module("torch").nn.Module()

    factory.from_config = from_config
    try:
        yield
    finally:
        factory.from_config = original


PAUSE = 0.02  # seconds between looks at the forks


def forked(job: Callable[[int], None], count: int, *, workers: int, seconds: float) -> Iterator[tuple[int, str]]:
    """Run `job` for 0 to `count` - 1, each in a fork; gives how each ended, killed after `seconds`."""
    running: dict[int, tuple[int, float]] = {}
    waiting = list(range(count))
    while waiting or running:
        while waiting and len(running) < workers:
            number = waiting.pop(0)
            process = os.fork()
            if not process:
                try:
                    job(number)
                except BaseException:  # noqa: BLE001 - the fork ends here, and its lack of an answer tells
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
