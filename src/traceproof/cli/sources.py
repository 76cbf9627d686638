"""Commands on repositories of kernel libraries: `traceproof clone-repos`, `dependents` and `bisect`."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from traceproof.bumps import Bisection, CommitVerdict, GroundTruthTrial, worst
from traceproof.checkouts.checkout import clone_all, record_of, write_records
from traceproof.checkouts.gitrun import Git, GitError, Patience, available
from traceproof.checkouts.packages import newest
from traceproof.checkouts.pins import FULL_COMMIT, NAME, ORIGINS, Pin, place_of, read_lock, resolve, write_lock
from traceproof.checkouts.sources import CommitTree, FileTree, FolderTree, changed_between
from traceproof.cli import options, run
from traceproof.dataset.fetch import fetch
from traceproof.dataset.tree import find, read_tree
from traceproof.dependents import Graph
from traceproof.environments.building import importable, of_package, op_types, stack_of, unlike_the_lock
from traceproof.errors import TraceproofError
from traceproof.programs import telling
from traceproof.run.flow import Pipeline
from traceproof.stacks import PACKAGES
from traceproof.text import has_credentials, printable, redacted

SHOWN = 40  # lines per list in the terminal; --json has all
PARTS_SHOWN = 3  # changed parts shown per op_type
FILES_SHOWN = 10  # of a commit that changed a verdict, at most

# clone-repos.


def clone_repos(  # noqa: PLR0913 - one parameter per option
    names: Annotated[list[str] | None, typer.Argument(help="Sources; all if none.")] = None,
    *,
    target_dir: options.TargetDir = None,
    branch: Annotated[list[str] | None, typer.Option(help="NAME=BRANCH: pin its newest commit.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="NAME=TAG: pin the tag's commit.")] = None,
    commit: Annotated[list[str] | None, typer.Option(help="NAME=COMMIT, all 40 digits.")] = None,
    release: Annotated[
        list[str] | None, typer.Option(help="NAME=VERSION, or NAME=newest: a released package instead.")
    ] = None,
    url: Annotated[list[str] | None, typer.Option(help="NAME=URL of a fork or a new source.")] = None,
    lfs: Annotated[list[str] | None, typer.Option(help="Sources whose LFS files are wanted too.")] = None,
    lock: Annotated[Path | None, typer.Option(help="Where the pins stand; sources.lock if left out.")] = None,
    pinned: Annotated[
        bool, typer.Option("--pinned", help="Take releases as pinned; look for no commits of their tags.")
    ] = False,
    json_file: options.JsonFile = None,
) -> None:
    """Clone or update the sources that sources.lock pins. Only options change a pin; a moved branch does not.

    A release that is not there yet comes from git, at the commit of its tag, which is pinned too. If git can not
    reach the repository, it comes from the package index, and a line says so. A source that can not be fetched
    does not stop the others. Without --target-dir and --lock, they go to sources/ and sources.lock of the
    repository, wherever the command runs. --json writes repos_config.json's content.

    Exit codes: 0 all are there, 2 bad use, or a source that could not be fetched.
    """
    available()
    home = Path.cwd()
    with contextlib.suppress(TraceproofError):  # without a repository, the working directory is used
        home = run.repository()
    place = lock or home / NAME
    folder = (target_dir or home / "sources").expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    urls, before = _pairs("url", url), read_lock(place)
    by_option = {"branch": branch, "tag": tag, "commit": commit, "release": release}
    chosen = _chosen({option: _pairs(option, values) for option, values in by_option.items()}, urls)
    sources = names or sorted({*ORIGINS, *before, *urls})
    unknown = sorted({*sources, *(lfs or []), *chosen} - {*ORIGINS, *before, *urls})
    if unknown:
        known = ", ".join(sorted({*ORIGINS, *before, *urls}))
        todo = "Give the repository of a new one with --url NAME=URL."
        raise TraceproofError(f"unknown sources: {', '.join(unknown)}; known: {known}", todo=todo)
    pins: dict[str, Pin] = {}
    failed: dict[str, str] = {}
    for name in sources:
        try:
            pins[name] = _pin(name, before.get(name), chosen.get(name), urls.get(name))
        except TraceproofError as error:
            failed[name] = str(error)
    tagged = {name for name in pins if name in ORIGINS and name not in chosen and name not in urls and not pinned}
    brought, completed = clone_all(pins, folder, lfs=lfs or [], tagged=tagged, patience=Patience())
    records = {
        name: record_of(place_of(name, folder), None) | {"error": text} for name, text in failed.items()
    } | brought
    value = write_records(folder, records)
    failed = {name: record["error"] for name, record in records.items() if "error" in record}
    now = read_lock(place)  # another process may have changed it
    after = now | {name: pin for name, pin in completed.items() if name not in failed}
    if after != now:
        write_lock(place, after)
    run.write_result(json_file, value)
    if lock is None:
        with contextlib.suppress(TraceproofError):  # without a repository, or with a bad config.yaml
            root, config = run.configured()
            for name, line in unlike_the_lock(config, root=root).items():
                if name in sources:
                    run.say(f"note: {line}")
    if failed:
        what = f"{len(failed)} of {len(sources)} sources could not be brought to {folder}"
        raise TraceproofError(what, problems=[f"{name}: {_one_line(text)}" for name, text in failed.items()])


def _one_line(text: str) -> str:
    """A message of several lines as one, for a list."""
    return "; ".join(line.strip().removeprefix("- ").rstrip(":;") for line in text.splitlines())


def _pairs(option: str, values: Sequence[str] | None) -> dict[str, str]:
    pairs = {}
    for text in values or []:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise TraceproofError(f"--{option} {text!r}: expected NAME=VALUE, e.g. --{option} flashinfer=...")
        pairs[name] = value
    return pairs


def _chosen(by_option: Mapping[str, Mapping[str, str]], urls: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Source -> (option that chooses its version, value). Raises TraceproofError: options contradict."""
    for name, address in urls.items():
        if has_credentials(address):
            what = f"--url {name}: the address holds credentials, and sources.lock is a tracked file"
            todo = f"Give {redacted(address)}, and set up git's credential helper or ssh."
            raise TraceproofError(what, todo=todo)
    chosen: dict[str, tuple[str, str]] = {}
    for option, values in by_option.items():
        for name, value in values.items():
            if name in chosen:
                raise TraceproofError(f"{name}: give one of --{chosen[name][0]}, --{option}")
            if option == "commit" and not FULL_COMMIT.fullmatch(value):
                raise TraceproofError(f"--commit {name}={value}: expected all 40 hexadecimal digits")
            if option == "release" and (name not in ORIGINS or not ORIGINS[name].package):
                raise TraceproofError(f"--release {name}: it is not known under which name it is released")
            chosen[name] = (option, value)
    return chosen


def _pin(name: str, old: Pin | None, chosen: tuple[str, str] | None, url: str | None) -> Pin:
    """A source's new pin: by an option, else as before, else at the newest commit of its repository."""
    option, value = chosen or ("", "")
    if option == "release":
        origin = ORIGINS[name]
        version = newest(str(origin.package)) if value == "newest" else value
        return Pin(package=origin.package, version=version, folder=origin.inside or None)
    if not option and url is None and old is not None:
        return old
    address = url or (old.url if old and old.url else None) or ORIGINS[name].url
    refs = {"branch": f"refs/heads/{value.removeprefix('refs/heads/')}", "commit": value}
    refs |= {"tag": f"refs/tags/{value.removeprefix('refs/tags/')}", "": "HEAD"}
    ref = refs[option]
    commit = resolve(address, ref, git=Git(Path.cwd()))
    if old is not None and option == "tag" and (old.url, old.ref) == (address, ref) and old.commit != commit:
        what = f"{name}: the tag {ref.removeprefix('refs/tags/')} of {address} was moved"
        problems = [f"sources.lock has {old.commit}", f"the remote has   {commit}"]
        todo = f"Find out why. To take the new one all the same: --commit {name}={commit}."
        raise TraceproofError(what, problems=problems, todo=todo)
    return Pin(url=address, commit=commit, ref=None if ref == commit else ref)


# dependents.


def dependents(
    *,
    root: Annotated[Path, typer.Option(help="The repository, or an unpacked package.")] = Path(),
    changed: Annotated[list[str] | None, typer.Option(help="Changed files, relative to --root.")] = None,
    between: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Two commits: what differs between them.")
    ] = None,
    dataset: Annotated[Path | None, typer.Option(help="A dataset, to name the definitions too.")] = None,
    json_file: options.JsonFile = None,
) -> None:
    """List what depends on changed files, with the chains of reasons.

    Works on any Python repository; op_types are known for FlashInfer, SGLang and Flash Linear Attention. Exit
    codes: 0 answered, 2 bad use or input.
    """
    if bool(changed) == bool(between):
        raise TraceproofError("give the changed files with --changed FILE..., or two commits with --between A B")
    root = root.expanduser().resolve()
    answer = _between(root, *between) if between else _changed(root, changed or [])
    answer["definitions"] = []
    if dataset is not None:
        folder = dataset.expanduser() / "definitions"
        if not folder.is_dir():
            raise TraceproofError(f"--dataset {dataset} holds no definitions")
        files = (path for op_type in answer["op_types"] for path in (folder / op_type).glob("*.json"))
        answer["definitions"] = sorted(path.stem for path in files)
    run.end(json_file, answer, _dependents_text(answer))


def _changed(root: Path, paths: Sequence[str]) -> dict[str, Any]:
    """Op_types and tests that depend on files of a folder."""
    for path in map(Path, paths):
        if path.is_absolute() and not path.is_relative_to(root):
            todo = "Give the repository with --root."
            raise TraceproofError(f"--changed {path} does not lie in {root}", todo=todo)
    names = [(root / name).relative_to(root).as_posix() for name in paths]
    tree = FolderTree(root)
    if absent := [name for name in names if name not in tree.files]:
        todo = "For deleted files, compare two commits: --between A B."
        raise TraceproofError(f"not in {root}: {', '.join(absent)}", todo=todo)
    return {"changed": names, **_reached(names, tree)}


def _between(root: Path, before: str, after: str) -> dict[str, Any]:
    """Op_types and tests that depend, in either commit, on the files that differ between two."""
    commits = [Git(root).commit(name) for name in (before, after)]
    names = changed_between(root, *commits)
    trees = [CommitTree(root, commit) for commit in commits]
    old, new = (_reached([name for name in names if name in tree.files], tree) for tree in trees)
    joined = {key: {**old[key], **new[key]} for key in ("op_types", "tests")}
    return {"commits": commits, "changed": names, **{key: new[key] or old[key] for key in new}, **joined}


def _reached(names: list[str], tree: FileTree) -> dict[str, Any]:
    """Op_types and tests that depend on changed files of a tree."""
    stack = stack_of(tree)
    if not names:
        return {"stack": stack, "op_types": {}, "tests": {}, "everything": None}
    graph = Graph(tree)
    reached = graph.reach(names)
    affected = [path for path in graph.tests if reached.everything or path in reached.chains]
    tests = {path: [str(step) for step in reached.chains.get(path, ())] for path in affected}
    # A verdict depends on all files of the package in its environment.
    parts = [name for name in names if stack is not None and of_package(stack, name)]
    why = [f"{name}: lies in the package of {stack}" for name in parts[:1]]
    by_type = {op_type: {"parts": parts, "why": why} for op_type in op_types(stack)} if stack and parts else {}
    return {"stack": stack, "op_types": by_type, "tests": tests, "everything": reached.everything}


def _dependents_text(answer: Mapping[str, Any]) -> str:
    """The result of `dependents` as text: op_types, definitions, then tests with the chain that leads to each."""
    lines = [f"{len(answer['changed'])} changed files"]
    if answer["stack"]:
        lines.append(f"op_types of {answer['stack']}: {', '.join(answer['op_types']) or 'none'}")
    for op_type, reasons in answer["op_types"].items():
        more = len(reasons["parts"]) - PARTS_SHOWN
        parts = ", ".join(reasons["parts"][:PARTS_SHOWN]) + (f" and {more} more" if more > 0 else "")
        lines += [f"  {op_type}: {parts}", *(f"      {step}" for step in reasons["why"])]
    if answer["definitions"]:
        lines.append(f"definitions: {', '.join(answer['definitions'])}")
    why = f": all, since {answer['everything']}" if answer["everything"] else ""
    lines.append(f"{len(answer['tests'])} test files{why}")
    for path, steps in list(answer["tests"].items())[:SHOWN]:
        lines += [f"  {path}", *(f"      {step}" for step in steps)]
    if len(answer["tests"]) > SHOWN:
        lines.append(f"  ... and {len(answer['tests']) - SHOWN} more; --json has all")
    return "".join(f"{printable(line)}\n" for line in lines)


# bisect.


def bisect(  # noqa: PLR0913 - one parameter per option
    *,
    definition: Annotated[str, typer.Option(help="A definition's name.")],
    good: Annotated[str, typer.Option(help="A commit, tag or branch with the one verdict.")],
    bad: Annotated[str, typer.Option(help="A later one with the other verdict.")],
    repository: Annotated[Path, typer.Option(help="A clone of FlashInfer, SGLang or Flash Linear Attention.")],
    dataset: options.Dataset = None,
    json_file: options.JsonFile = None,
) -> None:
    """Find the first commit whose ground truth has another verdict. Commits of equal content are run once.

    Exit codes: 0 found, 2 bad use, or both ends have the same verdict.
    """
    root, config = run.configured(dataset=run.dataset_in(dataset))
    flow = Pipeline(config, root)
    folder = fetch(flow.config.dataset, root=root / flow.config.results / "dataset")
    op_type = find(read_tree(folder, naming=[definition]), definition).definition.op_type
    repository = _clone(repository.expanduser().resolve())
    stack = stack_of(CommitTree(repository, bad))
    if stack is None or op_type not in op_types(stack):
        what = f"{repository} has no ground truth of {op_type}: {'no known package' if stack is None else stack}"
        raise TraceproofError(what, todo=f"Give a clone of one of {', '.join(PACKAGES)}.")
    with tempfile.TemporaryDirectory(prefix="traceproof-bisect-") as scratch:
        place = Path(scratch)
        trial = GroundTruthTrial(
            flow=flow, root=root, definitions=(definition,), op_type=op_type, stack=stack, work=place / "work"
        )
        with _worktree(repository, place / "checkout") as checkout:

            def judge(commit: str) -> CommitVerdict:
                checkout.local("checkout", "--quiet", "--force", "--detach", commit)
                if (checkout.folder / ".gitmodules").is_file():
                    with contextlib.suppress(GitError):
                        checkout.network("submodule", "update", "--init", "--recursive", "--depth=1")
                with telling(f"judging {commit[:12]}"):
                    rows = trial.rows(importable(checkout.folder, stack, place / "linked"), commit)
                return {"verdict": worst(rows), "rows": [row.as_json() for row in rows]}

            answer = Bisection(repository, stack, op_type, judge, run.say).search(good, bad)
    subject = Git(repository).local("log", "-1", "--format=%h %an %as %s", answer.commit).strip()
    facts = {name: value for name, value in asdict(answer).items() if name not in {"good", "bad"}}
    ends = {"before": answer.good["verdict"], "after": answer.bad["verdict"]}
    lines = [f"{ends['before']} became {ends['after']} with {subject}"]
    if answer.doubtful:
        lines.append(f"  or with one of these, which could not be judged: {', '.join(answer.doubtful)}")
    counts = f"{answer.commits} commits, {answer.touching} touch the package of {stack}"
    lines += [f"  {counts}, {answer.tried} states were run"]
    lines += [f"  changed: {part}" for part in answer.parts[:FILES_SHOWN]]
    run.end(json_file, {**facts, "subject": subject, **ends}, "".join(f"{line}\n" for line in lines))


def _clone(folder: Path) -> Path:
    """The folder, if it is the top of a repository. Raises TraceproofError: it is not, even if inside of one."""
    todo = f"Give a clone with its history: git clone URL FOLDER, of one of {', '.join(PACKAGES)}."
    if not folder.is_dir():
        raise TraceproofError(f"--repository {folder}: there is no such folder", todo=todo)
    inside = Git(folder).local("rev-parse", "--show-prefix").strip()
    if inside:
        top = Git(folder).local("rev-parse", "--show-toplevel").strip()
        problem = f"it is a folder of the repository {top}; below `sources/`, a released package has no history"
        raise TraceproofError(f"--repository {folder} is no git repository", problems=[problem], todo=todo)
    return folder


@contextlib.contextmanager
def _worktree(repository: Path, folder: Path) -> Iterator[Git]:
    """Git in a temporary worktree, which leaves the repository's checkout unchanged."""
    Git(repository).local("worktree", "add", "--detach", "--no-checkout", str(folder), "HEAD")
    try:
        yield Git(folder)
    finally:
        Git(repository).local("worktree", "remove", "--force", "--force", str(folder))
