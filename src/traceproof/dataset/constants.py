"""Constants that decide an op's numbers and are no input, each with all sources that state it.

What is expected must not come from the reference alone, which is judged by it. So each constant that an oracle, a
draw, a baseline or an adapter needs is one of the `rules` of its op's declaration, which names further sources.
They rank in this order: an axis, the descriptions, the name, the config of a bundled model that a tag names, the
function that `fi_api` names if that has one value alone; then the reference. Two sources that differ are a fault
of the definition. What the reference alone states is used and reported, and proves nothing.
"""

import importlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from traceproof.dataset import reference_text
from traceproof.models.catalogue import entries
from traceproof.stacks import PACKAGES, TAGGED

if TYPE_CHECKING:
    from traceproof.dataset.definition import Definition

Value = float | str
# (regular expression, value); None: the value is the number in group 1
Patterns = tuple[tuple[str, Value | None], ...]
FUNCTION = f"fi_api:{PACKAGES[TAGGED]}."  # tag prefix before the name of a function, as rules have it
FLASHINFER = "0.7.2.post1"  # version whose functions and defaults rules name
KEPT = 1024  # definitions whose constants are cached
NUMBER = r"(10 ?(?:\^|\*\*) ?-\d+|\d+(?:\.\d+)?(?:e[-+]?\d+)?)"
# words allowed between a constant and its number
STATES = r"[\s:=(]*(?:(?:is|of|fixed|set|at|to|by|value|equals)[\s:=(]+)*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Sources of one constant of an op_type."""

    name: str  # key by which ops look it up
    label: str  # its name for people
    # In a reference's text: the number assigned to the first of these names that it has (lower case); or the
    # result of a function of `reference_text`, which `read` describes in words.
    assigned: tuple[str, ...] = ()
    reader: str = ""
    read: str = ""
    needs: str = ""  # an input; without it the constant has no meaning
    axes: tuple[str, ...] = ()
    described: Patterns = ()  # patterns for the descriptions, in lower case
    named: Patterns = ()  # patterns for the definition's name
    config: tuple[str, ...] = ()  # keys of a model's config
    values: Mapping[str, Value] = field(default_factory=dict)  # word in a config -> value
    # function of FlashInfer that has one value alone -> value
    functions: Mapping[str, Value] = field(default_factory=dict)
    # function of FlashInfer -> (parameter, default): a caller may set another value, so it confirms the
    # reference's, and refutes nothing
    defaults: Mapping[str, tuple[str, Value]] = field(default_factory=dict)
    usual: Value | None = None  # value that holds if nobody states another one; it confirms as a default does


class Statement(NamedTuple):
    """The value that one source states."""

    source: str  # `reference`, `description`, `name`, `axis top_k`, `model config llama-3.1-8b`, `fi_api ...`
    value: Value


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant with all its statements; the first one is used."""

    label: str
    stated: tuple[Statement, ...]
    alone: bool  # whether only the reference states it

    @property
    def value(self) -> Value:
        """The value that is used."""
        return self.stated[0].value

    @property
    def conflict(self) -> str:
        """The sources' values if they differ: `epsilon is 1e-05 by description and 0.01 by reference`; else ""."""
        by_value: dict[Value, list[str]] = {}
        for statement in self.stated:
            by_value.setdefault(statement.value, []).append(statement.source)
        parts = [f"{shown(value)} by {', '.join(sources)}" for value, sources in by_value.items()]
        return f"{self.label} is {' and '.join(parts)}" if len(parts) > 1 else ""


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of a definition by name."""

    entries: Mapping[str, Constant]

    def get(self, name: str) -> Value | None:
        """The value of a constant; None: nobody states it."""
        constant = self.entries.get(name)
        return None if constant is None else constant.value

    def number(self, name: str) -> float:
        """The value of a constant as a number. Raises LookupError: nobody states one."""
        value = self.get(name)
        if value is None or isinstance(value, str):
            raise LookupError(f"nobody states {name}")
        return value

    @property
    def conflicts(self) -> tuple[str, ...]:
        """For each constant whose sources differ, all its values with their sources."""
        return tuple(constant.conflict for constant in self.entries.values() if constant.conflict)

    @property
    def alone(self) -> tuple[str, ...]:
        """For each constant that only the reference states: `epsilon 1e-05 by the reference alone`."""
        stated = (f"{entry.label} {shown(entry.value)}" for entry in self.entries.values() if entry.alone)
        return tuple(f"{text} by the reference alone" for text in stated)

    def as_json(self) -> dict[str, list[list[Value]]]:
        """All statements, by constant: [source, value]."""
        return {name: list(map(list, item.stated)) for name, item in self.entries.items()}


def shown(value: Value) -> str:
    """A value as text."""
    return value if isinstance(value, str) else f"{value:g}"


def rules_of(op_type: str) -> tuple[Rule, ...]:
    """The rules of an op_type; () if nobody declares it."""
    registry: Any = importlib.import_module("traceproof.ops.registry")  # late, since ops import this package
    declared = registry.declarations().get(op_type)
    return () if declared is None else tuple(declared[1].rules)


def epsilon(*functions: str, config: tuple[str, ...]) -> Rule:
    """The rule for a norm's epsilon: FlashInfer's functions with a parameter `eps`, and keys of model configs."""
    return Rule(
        name="eps",
        label="epsilon",
        assigned=("eps", "epsilon", "variance_epsilon"),
        described=(
            (rf"(?:\b|_)(?:eps|epsilon)\b{STATES}{NUMBER}", None),
            (r"\b(\d+(?:\.\d+)?e-\d+) (?:eps|epsilon)\b", None),
        ),
        config=config,
        defaults=dict.fromkeys(functions, ("eps", 1e-06)),
    )


def constants_of(definition: "Definition") -> Constants:
    """The constants of a definition, by its op_type's rules."""
    rules = rules_of(definition.op_type)
    if not rules:
        return NOTHING
    parts = (definition, *definition.axes.values(), *definition.inputs.values(), *definition.outputs.values())
    used = {axis for rule in rules for axis in rule.axes}
    return _constants_of(
        definition.op_type,
        definition.name,
        " ".join(part.description for part in parts if part.description),
        definition.tags,
        tuple((axis, size) for axis, size in definition.const_axes.items() if axis in used),
        frozenset(definition.inputs),
        definition.reference,
    )


NOTHING = Constants(MappingProxyType({}))


@lru_cache(KEPT)
def _constants_of(  # noqa: PLR0913, PLR0917 - the parts of a definition that state constants, as cache key
    op_type: str,
    name: str,
    text: str,
    tags: tuple[str, ...],
    axes: tuple[tuple[str, int], ...],
    inputs: frozenset[str],
    reference: str,
) -> Constants:
    """The constants of a definition, from the parts of it that state them, with the sources of each."""
    constants = {}
    functions = [tag.removeprefix(FUNCTION) for tag in tags if tag.startswith(FUNCTION)]
    for rule in rules_of(op_type):
        if rule.needs and rule.needs not in inputs:
            continue
        stated = [Statement(f"axis {axis}", size) for axis, size in axes if axis in rule.axes]
        stated += _matching(rule.described, text.lower().replace("\N{MINUS SIGN}", "-"), "description")
        stated += _matching(rule.named, name, "name")
        stated += _of_models(rule, tags)
        stated += [Statement(f"fi_api {api}", rule.functions[api]) for api in functions if api in rule.functions]
        stated = [statement for statement in stated if _is_finite(statement.value)]
        usual = [rule.defaults[api][1] for api in functions if api in rule.defaults]
        usual += [] if rule.usual is None else [rule.usual]
        in_reference = _of_reference(rule, reference)
        alone = in_reference is not None and not stated and in_reference not in usual
        stated += [] if in_reference is None else [Statement("reference", in_reference)]
        if not stated and rule.usual is not None:
            stated = [Statement("usual", rule.usual)]
        if stated:
            constants[rule.name] = Constant(rule.label, tuple(stated), alone)
    return Constants(MappingProxyType(constants))


def _of_models(rule: Rule, tags: tuple[str, ...]) -> list[Statement]:
    """The values in the configs of the bundled models that `model:` tags name."""
    stated = []
    for model in (tag.removeprefix("model:") for tag in tags if rule.config and tag.startswith("model:")):
        for config in (entry.config for entry in entries().values() if model in entry.tags):
            content = next((config[key] for key in rule.config if config.get(key) is not None), None)
            value = rule.values.get(content) if isinstance(content, str) else content
            stated += [] if value is None else [Statement(f"model config {model}", value)]
    return stated


def _of_reference(rule: Rule, reference: str) -> Value | None:
    """The value that a reference's text states; None: none, or none that is finite."""
    if rule.reader:
        value: Value | None = getattr(reference_text, rule.reader)(reference)
    else:
        numbers = reference_text.assigned(reference)
        value = next((numbers[name] for name in rule.assigned if name in numbers), None)
    return value if value is not None and _is_finite(value) else None


def _matching(patterns: Patterns, text: str, source: str) -> list[Statement]:
    """The value that a text states by these patterns, as a list of one; [] if there is none, or several."""
    values: set[Value] = set()
    for pattern, value in patterns:
        for match in re.finditer(pattern, text):
            if value is not None:
                values.add(value)
                continue
            power = re.fullmatch(r"10 ?(?:\^|\*\*) ?(-\d+)", match[1])
            number = float(f"1e{power[1]}" if power else match[1])  # infinite where float64 does not hold it
            values.add(int(match[1]) if match[1].isdigit() and math.isfinite(number) else number)
    return [Statement(source, value) for value in values] if len(values) == 1 else []


def _is_finite(value: Value) -> bool:
    """Whether a value is a word, or a number that float64 can hold."""
    try:
        return isinstance(value, str) or math.isfinite(value)
    except OverflowError:  # an integer that is too large
        return False


def implied_constraints(definition: "Definition") -> tuple[str, ...]:
    """Constraints on axes that the reference implies, by which sizes are drawn where there is no oracle."""
    return reference_text.implied_constraints(definition.reference, frozenset(definition.axes))


def renumbered(definition: "Definition", changes: Mapping[int, int]) -> str:
    """The reference's text with integers replaced, for a scaled-down definition."""
    return reference_text.renumbered(definition.reference, changes)


def numbers(definition: "Definition", *, computed: bool = False) -> tuple[tuple[int | float, int], ...]:
    """(number, line) of every number in the reference, which a scaled-down definition must not make false."""
    return reference_text.numbers(definition.reference, computed=computed)
