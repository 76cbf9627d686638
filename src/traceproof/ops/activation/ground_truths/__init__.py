"""Ground truths of activation, one file per source."""

from collections.abc import Callable, Mapping

from traceproof.ops.activation.oracle import activation_of
from traceproof.ops.adapter import SM75, Adapter, Api, Definition, Outputs, Values, signature
from traceproof.text import names

Call = Callable[[Api, Definition, Values], Outputs]
GATED = signature("input -> output", rows="input")


def fused(places: Mapping[str, str], call: Call, *, packages: tuple[str, ...] = ()) -> tuple[Adapter, ...]:
    """Adapters of a package with a function per activation, the product with the other half included."""
    return tuple(
        Adapter(
            place.replace(":", "."),
            GATED,
            call,
            (place,),
            accepts=_accepts(kind),
            dtypes=names("float16 bfloat16"),
            packages=packages,
            sm=SM75,
        )
        for kind, place in places.items()
    )


def _accepts(kind: str) -> Callable[[Definition], bool]:
    return lambda definition: activation_of(definition) == kind
