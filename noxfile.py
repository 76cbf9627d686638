"""Sessions, each with the interpreter it needs; `nox -l` explains them. Snakemake decides what has to run.

The test environment is built like a stack of its own: pins first, then everything from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
sys.path[:0] = [
    str(ROOT / "src"),
    str(ROOT / "scripts"),
]  # nox may run from anywhere; every op_type names its family
OWN = Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()
if not OWN and not all(map(find_spec, ("pydantic", "ruamel", "snakemake"))):  # another nox: set up, become ours
    from _setup import run as become

    become(None, "nox", *sys.argv[1:])

from traceproof.config import config_of  # noqa: E402 - after the path
from traceproof.environments.building import install_cpu  # noqa: E402
from traceproof.ops.registry import families  # noqa: E402
from traceproof.programs import telling  # noqa: E402
from traceproof.stacks import ENVIRONMENTS  # noqa: E402

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
CHECKED = ("src", "tests", "scripts", "envs", "docs/pages.py", "lab", "noxfile.py")
DOCS = ("python", "-m", "mkdocs", "build", "--strict")  # a broken link or anchor is an error
QUIET = {"NO_MKDOCS_2_WARNING": "1"}
BROWSER = ("playwright==1.65.2", "axe-playwright-python==0.1.8")  # drives a Chromium that is installed already
WORKERS = "4"  # pytest workers: files wait for processes and disks about half of the time


def prepare(session: nox.Session) -> None:
    """Install the test environment where its pins changed: torch for the CPU, the driver's packages, the tools."""
    pins = [ROOT / "envs" / name for name in ("cpu.txt", "tests.txt")]
    stamp = Path(session.virtualenv.location) / "installed.txt"
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in [*pins, ROOT / "pyproject.toml"])).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    install_cpu(Path(session.virtualenv.location) / "bin" / "python", pins[0], "tests")
    quiet = ("python", "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps")
    with telling("installing the tools"):
        session.run(*quiet, "--require-hashes", "-r", str(pins[1]))
        session.run(*quiet, "--no-build-isolation", "-e", ".")
    stamp.write_text(wanted)


@nox.session(name="tests")
def tests(session: nox.Session) -> None:
    """Everything that a change must pass: lints, layers, types, the DAG, and every test that needs no GPU.

    `nox -s tests -- -m "not slow"` leaves out those that take long; pyproject.toml has the rule.
    """
    prepare(session)
    session.run("ruff", "check", *CHECKED)
    session.run("ruff", "format", "--check", *CHECKED)
    session.run("snakefmt", "--check", "Snakefile", "rules", "workflow/Snakefile")
    session.run("hadolint", "Containerfile")
    session.run("lint-imports", "--no-logo")
    session.run("mypy")
    session.run("python", "envs/lock.py", "--check")
    session.run(*DOCS, "--site-dir", str(Path(session.virtualenv.location) / "docs"), env=QUIET)
    # Processes that tests start write no compiled modules; each would compile those that it imports.
    session.run("python", "-m", "compileall", "-q", "src", "lab")
    # One torch thread per worker: workers with all cores each take longer together.
    # Files stay whole, since those that run the pipeline set it up once, in the order of tests/conftest.py.
    split = ("--numprocesses", WORKERS, "--dist", "loadfile", "--no-loadscope-reorder")
    session.run("pytest", *split, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(name="docs", venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation site into results/docs, strictly: run `tests` once before."""
    site = ROOT / "results" / "docs"
    session.run(f"{tools(session)}/python", *DOCS[1:], "--site-dir", str(site), external=True, env=QUIET)


@nox.session(name="lint", venv_backend="none")
def lint(session: nox.Session) -> None:
    """Format, lints and layers only, with the test environment's tools: run `tests` once before."""
    tool = tools(session)
    session.run(f"{tool}/ruff", "check", *CHECKED, external=True)
    session.run(f"{tool}/ruff", "format", "--check", *CHECKED, external=True)
    session.run(f"{tool}/snakefmt", "--check", "Snakefile", "rules", external=True)
    session.run(f"{tool}/hadolint", "Containerfile", external=True)
    session.run(f"{tool}/lint-imports", "--no-logo", external=True)


@nox.session(name="typing", venv_backend="none")
def typing(session: nox.Session) -> None:
    """Types only, with the test environment's tools: run `tests` once before."""
    session.run(f"{tools(session)}/mypy", external=True)


@nox.session(name="lock", venv_backend="none")
def lock(session: nox.Session) -> None:
    """Resolve every stack again into uv.lock and envs/; `nox -s lock -- --upgrade` takes newer versions."""
    session.run(sys.executable, "envs/lock.py", *session.posargs, external=True)


@nox.session(name="stacks", venv_backend="none")
def stacks(session: nox.Session) -> None:
    """Build every stack's environment and import all that its adapters name; `-- --stack fla` for one of them."""
    session.run(sys.executable, "envs/stacks.py", *session.posargs, external=True)


@nox.session(name="stack", venv_backend="none")
@nox.parametrize("environment", [nox.param(name, id=name) for name in ENVIRONMENTS])
def stack(session: nox.Session, environment: str) -> None:
    """Build one environment of .venvs/ from its pins and import all that its adapters name."""
    session.run(sys.executable, "envs/stacks.py", "--stack", environment, *session.posargs, external=True)


@nox.session(name="bundle", venv_backend="none")
def bundle(session: nox.Session) -> None:
    """Packages as files for a machine without an index: `-- --python 3.12 --out FOLDER [--stack NAME ...]`."""
    session.run(sys.executable, "envs/bundle.py", *session.posargs, external=True)


@nox.session(name="bench", venv_backend="none")
def bench(session: nox.Session) -> None:
    """Cost as a dataset grows: `-- --op-type rmsnorm gemm`; see docs/benchmarks.md."""
    session.run(sys.executable, "lab/bench_scale.py", *session.posargs, external=True)


@nox.session(name="browser", venv_backend="none")
def browser(session: nox.Session) -> None:
    """The report site in Chromium (Debian: apt-get install chromium): run `tests` once before."""
    python = f"{tools(session)}/python"
    session.run(python, "-m", "pip", "install", "-qq", *BROWSER, external=True)
    session.run(python, "-m", "pytest", "tests/test_site_browser.py", *session.posargs, external=True)


def tools(session: nox.Session) -> Path:
    """Where the test environment's programs are."""
    folder = ROOT / ".nox" / "tests" / "bin"
    if not (folder / "ruff").is_file():
        session.error("run `nox -s tests` once: it builds the environment that has the tools")
    return folder


def verify_family(session: nox.Session, family: str, op_types: tuple[str, ...]) -> None:
    """Snakemake's target of a family: the stacks are built once for all of them."""
    config = config_of(ROOT, {})
    summary = ROOT / config.results / config.run / "summaries" / f"{family}.json"
    if compared_nothing(summary):
        summary.unlink()  # an earlier run's: what is there afterwards is this one's
    cores = str(len(os.sched_getaffinity(0)))
    # The target stands first: behind an option that takes several values it would be one of them.
    command = [sys.executable, "-m", "snakemake", f"verify_{family}", "--cores", cores, *session.posargs]
    try:
        session.run(*command, external=True)
    except CommandFailed:
        if compared_nothing(summary):
            session.skip(f"the selected definitions of the dataset have no {' or '.join(op_types)}")
        raise


def compared_nothing(summary: Path) -> bool:
    """Whether a family's report is there and has no definition in it."""
    return summary.is_file() and not json.loads(summary.read_text(encoding="utf-8"))["groups"]


def add_family(family: str, op_types: tuple[str, ...]) -> None:
    """Register `test_<family>`."""

    def run(session: nox.Session) -> None:
        verify_family(session, family, op_types)

    run.__doc__ = f"Verify the configured dataset's definitions of {', '.join(op_types)}."
    nox.session(name=f"test_{family}", venv_backend="none")(run)


for name, members in families().items():
    add_family(name, members)
