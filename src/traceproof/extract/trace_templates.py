"""A third reading: what FlashInfer's own trace templates say of the definitions that were extracted.

A template is never published: it holds no sizes, its dtypes are those of a call, and some of its references are of
another kernel under the same name. It is brought into a definition's terms and held against ours; differences are
for a person to read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from traceproof.dataset.definition import FUNCTION, ConstAxis, Definition, TensorSpec
from traceproof.extract.compare import hidden_constants
from traceproof.extract.templates import Template, Templates, TemplateTensor

HEAD = (
    "Read off FlashInfer's source; in differences ours stands first. A template is evidence, not a judge:\n"
    "nothing of it is written into a definition."
)


@dataclass(frozen=True, slots=True)
class TemplateReading:
    """What a template says of a definition."""

    name: str  # of the definition
    template: str | None  # where it is; None: there is none for this kernel
    by: str  # "name": the template would give it this very name; "api": they belong to the same function
    differences: tuple[str, ...]  # ours first, the template's second
    # what only says how the API is called: inputs given when a wrapper plans, options of the call
    notes: tuple[str, ...] = ()


def template_readings(definitions: Sequence[Definition], templates: Templates) -> list[TemplateReading]:
    """What the templates say of each definition."""
    return [_template_reading(definition, templates) for definition in definitions]


def _template_reading(definition: Definition, templates: Templates) -> TemplateReading:
    named = [item for item in templates.found if item.name(definition.const_axes) == definition.name]
    tags = [tag.removeprefix(FUNCTION) for tag in definition.tags if tag.startswith(FUNCTION)]
    same_api = [item for item in templates.found if any(_serves(api, tag) for api in item.apis for tag in tags)]
    by, found = ("name", named) if named else ("api", same_api)
    if not found:
        return TemplateReading(definition.name, None, "", ())
    # Several variants of one function: the one that is nearest tells the most.
    spoken = [
        (tuple(_differences(definition, item)), item.place, tuple(_notes(definition, item))) for item in found
    ]
    differences, place, notes = min(spoken, key=lambda one: (len(one[0]), one[1]))
    return TemplateReading(definition.name, place, by, differences, notes)


def _serves(api: str, tag: str) -> bool:
    """Whether a function is a tag's, or a method of the class that the tag names; the module may be another.

    The dataset's tags name `flashinfer.gdn.f` where the function is `flashinfer.gdn_decode.f`.
    """
    return tag.rpartition(".")[2] in api.split(".")[-2:]


def _notes(definition: Definition, template: Template) -> Iterator[str]:
    pairs = [(definition.inputs, template.inputs), (definition.outputs, template.outputs)]
    names = [
        n for ours, theirs in pairs for n in ours if n in theirs and theirs[n].optional and not ours[n].optional
    ]
    if names:
        yield f"optional in the call: {', '.join(names)}"
    options = [name for ours, theirs in pairs for name in theirs if name not in ours and theirs[name].optional]
    if options:
        yield f"options of the call: {', '.join(dict.fromkeys(options))}"


def _differences(definition: Definition, template: Template) -> Iterator[str]:
    if definition.op_type != template.op_type:
        yield f"op_type: {definition.op_type} and {template.op_type}"
    yield from _axes(definition, template)
    yield from _tensors("inputs", definition.inputs, template.inputs)
    yield from _tensors("outputs", definition.outputs, template.outputs)
    yield from _constants(definition, template)


def _axes(definition: Definition, template: Template) -> Iterator[str]:
    used = _named([*definition.inputs.values(), *definition.outputs.values()])
    required = _named(
        spec for spec in (*template.inputs.values(), *template.outputs.values()) if not spec.optional
    )
    for name, axis in template.axes.items():
        ours = definition.axes.get(name)
        if ours is None:
            if name in required:
                yield f"axes.{name}: the template's alone"
        elif isinstance(ours, ConstAxis) != axis.const:
            kinds = ["const" if const else "var" for const in (isinstance(ours, ConstAxis), axis.const)]
            yield f"axes.{name}: {kinds[0]} and {kinds[1]}"
    yield from (f"axes.{name}: ours alone" for name in definition.axes if name in used - template.axes.keys())


def _named(specs: Iterable[TensorSpec | TemplateTensor]) -> set[str]:
    """Axes in the shapes of some tensors."""
    return {name for spec in specs for name in spec.shape or ()}


def _tensors(kind: str, ours: Mapping[str, TensorSpec], theirs: Mapping[str, TemplateTensor]) -> Iterator[str]:
    for name, spec in ours.items():
        other = theirs.get(name)
        if other is None:
            yield f"{kind}.{name}: ours alone"
            continue
        if spec.shape != other.shape:
            yield f"{kind}.{name}.shape: {_shape(spec.shape)} and {_shape(other.shape)}"
        if other.dtype is not None and other.dtype != spec.dtype:
            yield f"{kind}.{name}.dtype: {spec.dtype} and {other.dtype}"
        if spec.optional and not other.optional:
            yield f"{kind}.{name}: optional in ours alone"
    for name, other in theirs.items():
        if name not in ours and not other.optional:
            yield f"{kind}.{name}: the template's alone"


def _shape(shape: tuple[str, ...] | None) -> str:
    return "a number" if shape is None else f"[{', '.join(shape)}]"


def _constants(definition: Definition, template: Template) -> Iterator[str]:
    """Constants hidden in the references, where both have them."""
    if not template.reference:
        return
    ours = hidden_constants(definition)
    theirs = hidden_constants(definition.model_copy(update={"reference": template.reference}))
    for name, value in ours.items():
        if name in theirs and theirs[name] != value:
            yield f"reference: {name} is {value:g} and {theirs[name]:g}"


def template_report(found: Sequence[TemplateReading], templates: Templates) -> str:
    """Markdown: each definition with its template and the differences."""
    silent = [item for item in found if item.template is None]
    agreeing = [item for item in found if item.template is not None and not item.differences]
    differing = [item for item in found if item.differences]
    lines = [f"# What FlashInfer {templates.version}'s trace templates say", "", HEAD, ""]
    lines.append(
        f"{len(templates.found)} templates were read; {templates.unread} are made at run time and were not."
    )
    same, other, none = len(agreeing), len(differing), len(silent)
    lines.append(
        f"{len(found)} definitions: {same} have one that says the same, {other} one that differs, {none} none."
    )
    if differing:
        lines += ["", "| definition | template | found by | differences | notes |", "|---|---|---|---|---|"]
        lines += [
            f"| {_row(item)} | {'; '.join(item.differences)} | {'; '.join(item.notes)} |" for item in differing
        ]
    if agreeing:
        lines += ["", "## The same", "", "| definition | template | found by | notes |", "|---|---|---|---|"]
        lines += [f"| {_row(item)} | {'; '.join(item.notes)} |" for item in agreeing]
    if silent:
        lines += ["", "## No template", "", *(f"- {item.name}" for item in silent)]
    return "\n".join(lines) + "\n"


def _row(item: TemplateReading) -> str:
    return f"{item.name} | {item.template} | {item.by}"
