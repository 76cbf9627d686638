"""A definition's reference, or other code in its place, called in a worker that holds nothing else of ours.

References, mutants of them, solutions, the code of other suites: whatever came with a definition is read by the
policy first, loaded in a new worker with a folder of its own (`traceproof.run.runner`), and believed nothing but
the bytes of its outputs and what it says against itself (`traceproof.run.transfer`).
"""

import contextlib
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import traceproof
from traceproof.dataset.definition import Definition
from traceproof.files import OUT_OF_SPACE, BorderError, own_folder, remove_left, remove_tree
from traceproof.ops import registry
from traceproof.ops.base import Op, Tensors, Values
from traceproof.ops.cases import Case, Further
from traceproof.run.calls import GOLDEN
from traceproof.run.case import Subject
from traceproof.run.runner import FOLDER, TRITON
from traceproof.run.transfer import PLAIN, Layout, Taken, Transfer
from traceproof.sandbox import MIB, ItemOutcome, Limits, Pool, Session, Status, policy
from traceproof.sandbox.isolation import CUDA_REFUSES

CALL = "traceproof.run.runner:setup"
PRELOAD = ("torch", "traceproof.run.runner")  # of a pool for untrusted code
SCRATCH_ROOM = 256 * MIB  # beside what a case is planned to need
ANSWER_BYTES = MIB
NAN = float("nan")


FOLDERS = (
    FOLDER,
    ".cache",
    ".triton",
)  # below a worker's home: where compilers put what they are not told to elsewhere


def new_name() -> str:
    """A module's name that says nothing."""
    return f"m{secrets.token_hex(6)}"


@dataclass(frozen=True, slots=True)
class CompiledFiles:
    """What one solution compiles."""

    scratch: Path  # the folder of its workers, of which one is there at a time
    kept: Path  # where its compiled files are kept; no worker sees it
    name: str = field(default_factory=new_name)  # of the module that it becomes
    keeping: bool = False  # whether what the next worker compiles is kept

    @classmethod
    @contextlib.contextmanager
    def new(cls) -> Iterator[Self]:
        """Those of a solution that has compiled nothing yet; removed in the end."""
        with own_folder("scratch") as scratch, own_folder() as kept:
            yield cls(scratch, kept / "files")

    @contextlib.contextmanager
    def restored(self) -> Iterator[Path]:
        """The folder for one worker, which must have ended when it is asked for again."""
        self._clear()
        if self.kept.is_dir():
            shutil.copytree(self.kept, self.scratch, symlinks=True, dirs_exist_ok=True)
        yield self.scratch
        if self.keeping:
            self._keep()
        self._clear()

    def _keep(self) -> None:
        """Keep what is compiled; links are left out: those to trusted kernels are made again, none is followed."""
        for name in FOLDERS:
            compiled = self.scratch / name
            if not compiled.is_dir() or compiled.is_symlink():
                continue
            try:
                shutil.copytree(compiled, self.kept / name, symlinks=True, ignore=_links)
            except (OSError, shutil.Error):  # a pipe, a file without permission: nothing that a compiler leaves
                remove_tree(self.kept)  # each worker compiles again
                return

    def _clear(self) -> None:
        for path in list(self.scratch.iterdir()):
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink(missing_ok=True)


def _links(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if (Path(folder) / name).is_symlink()}


def project_folders() -> list[Path]:
    """Where this project's code lies, which untrusted code does not see: the package, or a clone's folders."""
    package = Path(traceproof.__file__).resolve().parent
    root = package.parents[1]
    return [root / "src", root / "tests", root / "examples"] if (root / "Snakefile").is_file() else [package]


def refusal(source: str, rules: policy.Rules = policy.REFERENCE) -> ItemOutcome | None:
    """What comes of a source that the policy refuses; None: it may run."""
    refusals = policy.check(source, rules)
    if not refusals:
        return None
    return ItemOutcome(status=Status.REFUSED, message="; ".join(map(str, refusals)))


class CallError(RuntimeError):
    """A call of untrusted code that left no outputs; the text says why, the outcome how it ended."""

    def __init__(self, outcome: ItemOutcome) -> None:
        what = "the reference may not run" if outcome.status is Status.REFUSED else outcome.status
        super().__init__(f"{what}: {outcome.message}")
        self.outcome = outcome

    @property
    def told(self) -> str:
        """The last line of its message, an exception's own."""
        lines = self.outcome.message.strip().splitlines()
        return lines[-1] if lines else str(self.outcome.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """One call."""

    inputs: Sequence[Mapping[str, Any]]  # what lies in the file of inputs, in the order of arguments
    # data, out: names of the files of inputs and outputs
    data: str
    out: str
    # of torch's generator, one per draw; None: the draw goes on with the generator as the one before left it
    seeds: Sequence[int | None]
    trials: bool  # whether outputs of several draws are stacked along a new first axis
    # draws with repeated rows after those, as `draws.further_draws` takes them; None: none are made
    further: Mapping[str, Any] | None = None
    fill: float | None = NAN  # what memory without a value holds; None: whatever lies there
    threads: int = 1  # torch's
    mode: str = ""  # of `traceproof.run.shadow`; empty: the code as it is
    destinations: int = 0  # how many of the last inputs are places of outputs that the code writes
    how: str = ""  # the call is made, see `runner.SAME_MEMORY` and beside it
    surrounded: bool = False  # whether the inputs' surroundings count: on a GPU they are kept too
    size: int = 0  # of the file of inputs, bytes
    # repetitions that are timed in place of one call, as `timing.run` takes them; None: none are
    timing: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A source of a definition's form, in a worker of its own, which is replaced when it dies."""

    definition: Definition
    op: Op
    session: Session
    folder: Path  # of its files
    # how the worker knows the source, and what messages call it
    token: str
    name: str
    device: str = "cpu"

    def start(self) -> None:
        """Have the worker started and the source loaded while its inputs are drawn: a GPU takes long to open."""
        self.session.start()

    def run(  # noqa: PLR0913 - one call, spelled out
        self,
        case: Case,
        inputs: Values,
        *,
        seed: int,
        trials: int = 0,
        further: Further | None = None,
        layout: Layout = PLAIN,
        **order: Any,  # noqa: ANN401 - what else a CallRequest says
    ) -> Taken:
        """What one call leaves; several draws are stacked along a new first axis, `further` ones after `trials`.

        Raises CallError: no outputs.

        Of the rest of a `CallRequest`, `mode` is one of `traceproof.run.shadow`, for a single draw.
        """
        call = secrets.token_hex(8)
        data, out = f"{call}.in", f"{call}.out"
        transfer = Transfer(self.definition, self.op, self.folder, on_gpu=self.device != "cpu")
        try:
            sent = transfer.send(inputs, data, layout=layout, case=case, announce=self.session.give)
            places = range(len(sent.values), len(sent.specs))  # of outputs: they are repeated as inputs are
            request = CallRequest(
                inputs=sent.specs,
                data=data,
                out=out,
                seeds=[seed, *(_seed_of(seed, trial) for trial in range(1, trials))],
                trials=bool(trials),
                further=None if further is None else {**asdict(further), "inputs": [*further.inputs, *places]},
                destinations=sent.destinations,
                surrounded=bool(layout.room),
                size=sent.size,
                **order,
            )
            item = {name: getattr(request, name) for name in CallRequest.__dataclass_fields__}
            started = time.monotonic()
            outcome = self.session.ask(item | {"hold": True})
            seconds = time.monotonic() - started
            if outcome.status is not Status.OK:
                raise CallError(replace(outcome, message=outcome.message.replace(self.token, self.name)))
            taken = transfer.take(sent, outcome.value, case, data=data, out=out)
            return replace(taken, seconds=seconds, isolation=outcome.isolation)
        except BorderError as error:
            raise CallError(ItemOutcome(status=Status.CRASH, message=str(error))) from error
        except OSError as error:
            if error.errno in OUT_OF_SPACE:
                raise
            message = f"its folder takes no files any more: {error}"
            raise CallError(ItemOutcome(status=Status.CRASH, message=message)) from error
        finally:
            for name in (data, out):
                remove_left(self.folder / name)

    def outputs(self, subject: Subject) -> Tensors:
        """Outputs of a case; raises as `run` does."""
        return self.run(subject.case, subject.inputs, seed=subject.seed, trials=subject.trials).outputs


def _seed_of(seed: int, trial: int) -> int | None:
    """Of every other draw a seed of its own; the ones between show who is right with a fresh generator alone."""
    return None if trial % 2 else (seed + trial * GOLDEN) % (1 << 63)


def untrusted_pool(
    *,
    gpu: bool = False,
    conceal: Sequence[Path] = (),
    weak: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Pool:
    """Workers for untrusted code, which find the runner imported and see nothing else of this project.

    The arguments are those of `Pool`.
    """
    where = Path(traceproof.__file__).resolve().parents[1]
    given = dict(environment or {})
    env = {**given, "PYTHONPATH": str(where), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    without = CUDA_REFUSES if gpu else ()
    hidden = [*project_folders(), *conceal]
    readable = [Path(env[TRITON])] if TRITON in env else []
    return Pool(
        preload=PRELOAD,
        conceal=hidden,
        env=env,
        gpu=gpu,
        readable=readable,
        without=without,
        weak=weak,
    )


@contextmanager
def loaded(  # noqa: PLR0913 - one worker, spelled out
    definition: Definition,  # whose inputs and outputs it takes and gives
    pool: Pool,  # see `untrusted_pool`
    *,
    limits: Limits,  # of one call
    need: int,  # bytes that its largest case takes, by the op's estimate
    source: str | None = None,  # the code; None: the reference
    device: str = "cpu",  # where it gets its inputs
    ours: bool = False,  # whether we have added to a text that the policy has passed
    # files and an entry point in the place of a source, which the policy has passed; see `runner.load_solution`
    solution: Mapping[str, Any] | None = None,
    # what the solution has compiled before; None: nothing, and nothing is kept
    compiled: CompiledFiles | None = None,
    root: Path | None = None,  # the folder that its own is made in; None: that for temporary files
    fill: float | None = NAN,  # what memory without a value holds while it is loaded
) -> Iterator[Source]:
    """A definition's reference, or another source, in a new worker at the first call.

    Raises CallError: the policy refuses it.
    """
    text = definition.reference if source is None else source
    refused = None if ours or solution is not None else refusal(text)
    if refused is not None:
        raise CallError(refused)
    op, _ = registry.for_definition(definition)
    name = f"{'reference of' if solution is None else 'solution to'} {definition.name}"
    token = new_name() if compiled is None else compiled.name
    own = replace(limits, file_bytes=need + SCRATCH_ROOM, message_bytes=ANSWER_BYTES)
    payload = {"source": text, "name": token, "device": device, "threads": 1, "fill": fill, "solution": solution}
    with (
        own_folder("scratch", root) if compiled is None else compiled.restored() as folder,
        pool.session(setup=CALL, payload=payload, limits=own, scratch=folder) as session,
    ):
        yield Source(definition, op, session, folder, token, name, device)
