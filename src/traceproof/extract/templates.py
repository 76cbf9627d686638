"""A third reading: what FlashInfer's own trace templates say of the definitions that were extracted.

A template is a module's `name = TraceTemplate(op_type=..., axes={...}, inputs={...}, outputs={...}, ...)`, its
dicts written out there or under a name of the module. It is read off FlashInfer's source, which is neither
imported nor run; what is built by a function or out of another template is only counted. A template is never
published: it holds no sizes, its dtypes are those of a call, and some of its references are of another kernel
under the same name. It is brought into a definition's terms and held against ours; differences are for a person to
read.
"""

import ast
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceproof.dataset.definition import FUNCTION, ConstAxis, Definition, TensorSpec
from traceproof.errors import TraceproofError
from traceproof.extract.merge import hidden_constants
from traceproof.lint.flashinfer_names import Package
from traceproof.stacks import PACKAGES, TAGGED, distribution

PACKAGE = PACKAGES[TAGGED]
TEMPLATES = f"{PACKAGE}/trace/templates/"
NO_CODE = f"{PACKAGE}/data/"  # headers and kernels, and other packages' Python
DECORATOR = "flashinfer_api"


@dataclass(frozen=True, slots=True)
class TemplateAxis:
    """An axis: whether its size is fixed, and what stands before the size in a name (None: nothing does)."""

    const: bool
    prefix: str | None


@dataclass(frozen=True, slots=True)
class TemplateTensor:
    """An input or output; a scalar has no shape. A dtype that FlashInfer takes from what it is given is None."""

    shape: tuple[str, ...] | None
    dtype: str | None
    optional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A template in our terms."""

    place: str  # file and name
    op_type: str
    prefix: str
    axes: Mapping[str, TemplateAxis]
    inputs: Mapping[str, TemplateTensor]
    outputs: Mapping[str, TemplateTensor]
    reference: str  # source of its reference; empty: it has none, or it is not in the same file
    apis: tuple[str, ...]  # the functions that carry it, dotted

    def name(self, sizes: Mapping[str, int]) -> str | None:
        """The name of its definition with these sizes of const axes; None: one of its axes has none."""
        named = [(axis.prefix, name) for name, axis in self.axes.items() if axis.prefix is not None]
        if any(name not in sizes for _, name in named):
            return None
        return "_".join([self.prefix, *(f"{prefix}{sizes[name]}" for prefix, name in named)])


@dataclass(frozen=True, slots=True)
class Templates:
    """All templates of a FlashInfer, its version, and how many could not be read."""

    version: str
    found: tuple[Template, ...]
    unread: int


def read_templates(path: Path) -> Templates:
    """The templates of a FlashInfer, a wheel or a folder. Raises TraceproofError: it has none, or is none."""
    texts = dict(_texts(path))
    if not any(name.startswith(TEMPLATES) for name in texts):
        raise TraceproofError(
            f"the FlashInfer at {path} has no trace templates", todo="0.6.13 and 0.7.2 are known to have them."
        )
    carried = _carriers(texts)
    found, unread = [], 0
    for name in sorted(name for name in texts if name.startswith(TEMPLATES)):
        module = ast.parse(texts[name])
        names: dict[str, ast.stmt] = {}  # what each stands for
        for node in module.body:
            match node:
                case ast.FunctionDef(name=bound) | ast.Assign(targets=[ast.Name(id=bound), *_]):
                    names[bound] = node
                case ast.AnnAssign(target=ast.Name(id=bound)):
                    names[bound] = node
        calls = [node for node in ast.walk(module) if isinstance(node, ast.Call) and _makes_template(node)]
        read = [_template(node, name, names, carried) for node in module.body]
        made = [template for template in read if template is not None]
        found += made
        unread += len(calls) - len(made)
    if path.is_file():
        version = path.name.split("-")[1] if path.name.count("-") > 1 else "unknown"
    else:
        installed = Package(path).root.glob(f"{distribution(TAGGED).replace('-', '_')}-*.dist-info")
        version = next((item.stem.partition("-")[2] for item in installed), "unknown")
    return Templates(version, tuple(found), unread)


def _texts(path: Path) -> Iterator[tuple[str, str]]:
    """Python files by their path inside the package."""

    def wanted(name: str) -> bool:
        return name.startswith(f"{PACKAGE}/") and name.endswith(".py") and not name.startswith(NO_CODE)

    try:
        if path.is_file():
            with zipfile.ZipFile(path) as wheel:
                yield from ((name, wheel.read(name).decode("utf-8")) for name in wheel.namelist() if wanted(name))
            return
        root = Package(path).root
        files = ((file.relative_to(root).as_posix(), file) for file in sorted((root / PACKAGE).rglob("*.py")))
        yield from ((name, file.read_text(encoding="utf-8")) for name, file in files if wanted(name))
    except (zipfile.BadZipFile, OSError, UnicodeDecodeError) as error:
        raise TraceproofError(
            f"{path} cannot be read: {error}", todo="Give FlashInfer's wheel or folder."
        ) from error


def _carriers(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Dotted names of the functions that carry each template, by the template's name."""
    found: dict[str, list[str]] = {}
    for name, text in texts.items():
        if f"{DECORATOR}(" not in text:
            continue
        place = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        module = ast.parse(text)
        classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
        bodies = [(place, module.body), *((f"{place}.{node.name}", node.body) for node in classes)]
        functions = [(of, node) for of, body in bodies for node in body if isinstance(node, ast.FunctionDef)]
        for of, node in functions:
            decorators = [one for one in node.decorator_list if isinstance(one, ast.Call)]
            for keyword in (one for each in decorators if _called(each) == DECORATOR for one in each.keywords):
                if keyword.arg == "trace" and isinstance(keyword.value, ast.Name):
                    found.setdefault(keyword.value.id, []).append(f"{of}.{node.name}")
    return found


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _makes_template(node: ast.Call) -> bool:
    return _called(node).endswith("TraceTemplate")  # or a class derived from it, which adds behaviour alone


def _template(
    node: ast.stmt, file: str, names: Mapping[str, ast.stmt], carried: Mapping[str, list[str]]
) -> Template | None:
    """The template that a statement makes; None: it makes none, or one that is not written out."""
    match node:
        case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call() as call) if _makes_template(call):
            given = {keyword.arg: keyword.value for keyword in call.keywords}
        case _:
            return None
    try:
        op_type = ast.literal_eval(given["op_type"])
        prefix = ast.literal_eval(given["name_prefix"]) if "name_prefix" in given else op_type
        axes = {name: _axis(name, *made) for name, made in _value(given["axes"], names).items()}
        inputs = {name: _tensor(*made) for name, made in _value(given["inputs"], names).items()}
        outputs = {name: _tensor(*made) for name, made in _value(given["outputs"], names).items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    reference = given.get("reference")
    function = names.get(reference.id) if isinstance(reference, ast.Name) else None
    return Template(
        place=f"{file}: {target}",
        op_type=op_type,
        prefix=prefix,
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference=ast.unparse(function) if isinstance(function, ast.FunctionDef) else "",
        apis=tuple(carried.get(target, ())),
    )


def _value(node: ast.expr, names: Mapping[str, ast.stmt]) -> Any:  # noqa: ANN401 - what the text says
    """A dict that is written out, under a name or as `dict(other)` or `{**other, ...}`, a call or a literal.

    A call is its name, its arguments and its keywords. Raises ValueError: it is none of these.
    """
    match node:
        case ast.Dict(keys=keys, values=values):
            parts = [(key, _value(value, names)) for key, value in zip(keys, values, strict=True)]
            found: dict[Any, Any] = {}
            for key, value in parts:
                found |= value if key is None else {ast.literal_eval(key): value}
            return found
        case ast.Name(id=name) if isinstance(made := names.get(name), ast.Assign | ast.AnnAssign) and made.value:
            return _value(made.value, {other: one for other, one in names.items() if other != name})
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            given = [_value(one, names) for one in arguments]
            options = {str(one.arg): _value(one.value, names) for one in keywords}
            return given[0] | options if name == "dict" and len(given) == 1 else (name, given, options)
    return ast.literal_eval(node)


def _axis(name: str, kind: str, _given: Sequence[Any], options: Mapping[str, Any]) -> TemplateAxis:
    if kind not in {"Var", "Const"}:
        raise ValueError(kind)
    return TemplateAxis(kind == "Const", (options.get("abbrev", name) or None) if kind == "Const" else None)


def _tensor(kind: str, given: Sequence[Any], options: Mapping[str, Any]) -> TemplateTensor:
    optional = bool(options.get("optional"))
    if kind == "Scalar":
        return TemplateTensor(None, given[0] if given else options.get("dtype", "float32"), optional)
    if kind != "Tensor":
        raise ValueError(kind)
    return TemplateTensor(tuple(given[0] if given else options["dim_names"]), options.get("dtype"), optional)


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
    found = []
    for definition in definitions:
        named = [item for item in templates.found if item.name(definition.const_axes) == definition.name]
        # A function of the tag's, or a method of the class that it names; the module may be another: the dataset's
        # tags name `flashinfer.gdn.f` where the function is `flashinfer.gdn_decode.f`.
        tags = [tag.rpartition(".")[2] for tag in definition.tags if tag.startswith(FUNCTION)]
        same = [
            one for one in templates.found if any(tag in api.split(".")[-2:] for api in one.apis for tag in tags)
        ]
        # Several variants of one function: the one that is nearest tells the most.
        spoken = [
            (tuple(_differences(definition, item)), item.place, tuple(_notes(definition, item)))
            for item in named or same
        ]
        if not spoken:
            found.append(TemplateReading(definition.name, None, "", ()))
            continue
        differences, place, notes = min(spoken, key=lambda one: (len(one[0]), one[1]))
        found.append(TemplateReading(definition.name, place, "name" if named else "api", differences, notes))
    return found


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
    if template.reference:
        ours = hidden_constants(definition)
        theirs = hidden_constants(definition.model_copy(update={"reference": template.reference}))
        for name, value in ours.items():
            if name in theirs and theirs[name] != value:
                yield f"reference: {name} is {value:g} and {theirs[name]:g}"


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
