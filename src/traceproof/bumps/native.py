"""Files that are not Python: which of them a text in the code names, and what C++ and CUDA sources include."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache, cached_property

from traceproof.checkouts.tree import Tree
from traceproof.dependents.facts import ANYTHING

_NATIVE = ".cu .cuh .h .hpp .hh .c .cc .cpp .cxx .inl .inc .jinja .ptx .def"
NATIVE = tuple(_NATIVE.split())
OTHER = (".json", ".yaml", ".yml", ".toml", ".csv", ".txt", ".so", ".cubin", ".bin", ".npz", ".pt")
RESOURCE = re.compile(rf"[\w*./+-]+({'|'.join(re.escape(end) for end in (*NATIVE, *OTHER))})")
INCLUDE = re.compile(r"^[ \t]*#[ \t]*(?:include|import)[ \t]+(?:[<\"]([^>\"\n]+)[>\"]|(\w[^\n]*))", re.MULTILINE)
TEMPLATED = re.compile(r"\{\{.*?\}\}|\{%.*?%\}")


class Native:
    """The files of a tree that are not Python."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.by_base: dict[str, list[str]] = defaultdict(list)
        for path in tree.files:
            if is_source(path) or path.endswith(OTHER):
                self.by_base[path.rpartition("/")[2]].append(path)

    @cached_property
    def bases(self) -> str:
        """All base names, one a line, to search patterns in."""
        return "\n".join(sorted(self.by_base))

    def named(self, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Files that texts of one unit may name, each with the text.

        A pattern that fixes nothing of the base name counts for the folders that the other texts name.
        """
        texts = list(texts)
        for text in texts:
            if "\n" in text and "#include" in text:
                for target in self.includes_of(text, folder=""):
                    yield target, "an #include in a template"
            if len(text) < 300 and RESOURCE.fullmatch(text):
                folders = [one.strip("/") for one in texts if one.strip("/") and "." not in one]
                fixed = re.sub(r"\.\w+$", "", text.rpartition("/")[2]).strip(ANYTHING)
                for path in self.matching(text):
                    if fixed or not folders or any(f"/{folder}/" in f"/{path}" for folder in folders):
                        yield path, f"the text {text!r}"

    def matching(self, pattern: str) -> list[str]:
        """Files whose path ends in a pattern."""
        pattern = re.sub(r"^(\.\.?/)+", "", pattern).strip("/")
        base = pattern.rpartition("/")[2]
        if ANYTHING not in pattern:
            return [path for path in self.by_base.get(base, ()) if f"/{path}".endswith(f"/{pattern}")]
        bases = re.findall(f"^{_regex(base)}$", self.bases, re.MULTILINE)
        whole = re.compile(f"(.*/)?{_regex(pattern)}")
        return [path for name in bases for path in self.by_base[name] if whole.fullmatch(path)]

    def closure(self, starts: Iterable[str]) -> dict[str, str]:
        """The files that C++ and CUDA sources include, directly or not: file -> the file that includes it."""
        found: dict[str, str] = {}
        seen = set(starts)
        waiting = [path for path in seen if is_source(path)]
        while waiting:
            path = waiting.pop()
            for target in self.includes(path):
                if target not in seen:
                    seen.add(target)
                    found[target] = path
                    waiting.append(target)
        return found

    @cache  # noqa: B019 - lives as long as the tree is looked at
    def includes(self, path: str) -> tuple[str, ...]:
        """Files that one file may include."""
        if not is_source(path):
            return ()
        text = self.tree.read([path])[path].decode(errors="replace")
        return tuple(self.includes_of(text, folder=path.rpartition("/")[0]))

    def includes_of(self, text: str, *, folder: str) -> Iterator[str]:
        """Files that a text's #include lines may mean: one beside it, else any whose path ends so."""
        for found in INCLUDE.finditer(text):
            named, macro = found.groups()
            if named is None:
                # A macro: whatever native file lies in the same folder, since headers of one family do.
                yield from (path for path in self._beside(folder) if macro)
                continue
            wanted = TEMPLATED.sub(ANYTHING, named)
            beside = _join(folder, wanted)
            if beside in self.tree.files:
                yield beside
            else:
                yield from self.matching(wanted)

    @cache  # noqa: B019 - lives as long as the tree is looked at
    def _beside(self, folder: str) -> tuple[str, ...]:
        return tuple(
            path for paths in self.by_base.values() for path in paths if path.rpartition("/")[0] == folder
        )


def is_source(path: str) -> bool:
    """Whether a C++ or CUDA compiler may read a file; a header like the standard library's has no suffix."""
    return path.endswith(NATIVE) or "." not in path.rpartition("/")[2]


def _regex(pattern: str) -> str:
    return "[^\n]*".join(re.escape(part) for part in pattern.split(ANYTHING))


def _join(folder: str, name: str) -> str:
    parts = folder.split("/") if folder else []
    for part in name.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
