"""Stand-ins for packages that SGLang imports at its top but never needs to lay out a model.

Real ones would cost gigabytes (torchvision drags in its own torch and CUDA) or do not exist for a CPU. A package
that is missing and not named here stays an ImportError.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from traceproof.stand_ins import StandIns

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
