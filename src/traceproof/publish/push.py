"""Sending a bundle: to a hub as a pull request, or to any git remote as a branch of its own.

An attempt reads what the other side holds now, puts the bundle on top, checks it and makes at most one commit, so
that one whose answer was lost is found done by the next. No rule, script or stage imports this module.
"""

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from tenacity import RetryCallState, Retrying, retry_if_exception_type

from traceproof.checkouts.gitrun import MOVED, Git, GitError, Patience
from traceproof.errors import TraceproofError
from traceproof.publish.bundle import Base, Bundle
from traceproof.publish.change import Change, resolve
from traceproof.publish.check import problems
from traceproof.publish.coverage import tree_with
from traceproof.text import has_credentials, redacted

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Result = TypeVar("Result")
TRIES = 8
UNREACHED_SECONDS = 12.0  # after which a side that never answered is given up on
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds; the hub's rate limit is counted over minutes
CONNECT_SECONDS, READ_SECONDS = 5.0, 60.0  # of a hub; huggingface_hub would wait for ever
REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
HUB = "huggingface.co"
PASSING = frozenset({408, 429, 500, 502, 503, 504})
BASE_MOVED = 412
REFUSED = frozenset({401, 403})
PREFIX = "traceproof/"  # of branches of a git remote
PATIENCE = Patience(stall=900)  # a git remote may check long what it is sent


class Again(Exception):  # noqa: N818 - no error: the same attempt may well succeed
    """A passing failure: too many requests, a server that is down, a base that moved."""

    def __init__(self, what: str, *, wait: float | None = None, reached: bool = True) -> None:
        super().__init__(what)
        self.wait = wait  # seconds that the other side asked for; None: the usual pause
        self.reached = reached  # whether the other side ever answered


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push came to."""

    where: str  # the pull request or branch
    revision: str  # its commit
    committed: bool  # whether a commit was made; False: it held all of it already
    files: int  # how many files the pull request changes


Describe = Callable[[Change], str]  # the text of a pull request


def _silent(_line: str) -> None:
    """Say nothing of the progress."""


def _planned(bundle: Bundle, base: Base, *, allow_changes: bool) -> Change:
    """The bundle on top of a base, checked. Raises TraceproofError: it breaks a rule, or changes what is there."""
    change = resolve(bundle, base, allow_changes=allow_changes)
    found = problems(bundle, change, base)
    if found:
        todo = "Nothing was sent."
        if change.problems and not allow_changes:
            todo += (
                " If the changes listed are meant, give --allow-changes; they are then part of the description."
            )
        raise TraceproofError(
            f"{bundle.slug} cannot be published on top of {base.revision}", problems=found, todo=todo
        )
    return change


def _patiently(
    attempt: Callable[[], Result],
    *,
    pause: Callable[[float], None] = time.sleep,
    say: Callable[[str], None] = _silent,
) -> Result:
    """Make attempts until one goes through. Raises TraceproofError: none did; says what the last one ran into."""
    began = time.monotonic()

    def reason(state: RetryCallState) -> Again:
        found = state.outcome.exception() if state.outcome is not None else None
        assert isinstance(found, Again)
        return found

    def lost(state: RetryCallState) -> bool:
        return not reason(state).reached and time.monotonic() - began > UNREACHED_SECONDS

    def wait(state: RetryCallState) -> float:
        asked = reason(state).wait
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (state.attempt_number - 1) if asked is None else asked)

    def again(state: RetryCallState) -> None:
        last, seconds = str(reason(state))[:200], state.upcoming_sleep
        say(f"attempt {state.attempt_number} of {TRIES} failed ({last}); again in {seconds:g} s")

    def ended(state: RetryCallState) -> Result:
        what = f"{TRIES} attempts failed, the last one on"
        todo = "Run the same command again later: what was uploaded is not uploaded twice."
        if lost(state):
            what, todo = "the other side cannot be reached", "Check the address and the network."
        raise TraceproofError(f"not published: {what}: {reason(state)}", todo=todo) from None

    return Retrying(
        retry=retry_if_exception_type(Again),
        stop=lambda state: state.attempt_number >= TRIES or lost(state),
        wait=wait,
        sleep=pause,
        before_sleep=again,
        retry_error_callback=ended,
    )(attempt)


class Hub:
    """A dataset repository on a hub, and pull requests to it.

    The one place that holds a token: huggingface_hub reads it (HF_TOKEN, or the hub's own login) in this process,
    and whatever is said of a failure is cleared of it. Raises TraceproofError: the repository's name is none, or
    the endpoint no address of a hub.
    """

    def __init__(
        self,
        repository: str,  # `<owner>/<name>`
        *,
        endpoint: str = "",  # the hub's address; empty: HF_ENDPOINT, or the public hub
        pause: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = _silent,
    ) -> None:
        if not REPOSITORY.fullmatch(repository):
            raise TraceproofError(f"{repository!r} is no dataset repository", todo="Give it as <owner>/<name>.")
        self.repository = repository
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT", "") or f"https://{HUB}").rstrip("/")
        if not _is_address(self.endpoint):
            todo = "Give it as https://<host>, without user, password or token; the token comes from HF_TOKEN."
            raise TraceproofError(f"{self.endpoint} is no address of a hub", todo=todo)
        self._pause, self._say = pause, say
        self._reached = False  # whether it ever answered
        if urlsplit(self.endpoint).hostname != HUB:
            os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # read when huggingface_hub is imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def push(self, bundle: Bundle, describe: Describe, *, allow_changes: bool) -> Pushed:
        """Open the bundle's pull request, or bring the one that is open up to date.

        Raises TraceproofError: no token or no rights, a conflict with what is there, a server that gives up or
        that holds something else than it was sent.
        """
        self._say(f"{bundle.slug}: asking {self.endpoint} what {self.repository} holds")
        return _patiently(
            lambda: self._attempt(bundle, describe, allow_changes=allow_changes), pause=self._pause, say=self._say
        )

    def _attempt(self, bundle: Bundle, describe: Describe, *, allow_changes: bool) -> Pushed:
        with tempfile.TemporaryDirectory() as scratch:
            main = HubRevision(self, "main", Path(scratch))
            change = _planned(bundle, main, allow_changes=allow_changes)
            self._say(f"{bundle.slug}: {len(change.files)} files differ from {self.repository}")
            where = f"{self.endpoint}/datasets/{self.repository}"
            if not change.files:
                return Pushed(where, main.revision, committed=False, files=0)
            number = self.ask("pull requests", lambda: self._pull_request(bundle))
            head = main if number is None else HubRevision(self, f"refs/pr/{number}", Path(scratch))
            missing = {path: data for path, data in change.files.items() if not head.holds(path, data)}
            stale = sorted(head.paths() - main.paths() - change.files.keys())
            committed = bool(missing or stale)
            if committed:
                text = describe(change)
                number = self.ask("a commit", lambda: self._commit(bundle, missing, stale, text, head, number))
                head = HubRevision(self, f"refs/pr/{number}", Path(scratch))
        where = f"{where}/discussions/{number}"
        wrong = [path for path, data in change.files.items() if not head.holds(path, data)]
        if wrong:
            raise TraceproofError(
                f"{where} does not hold what was sent: the server's copy differs",
                problems=[f"{path}: listed otherwise" for path in wrong],
                todo="Do not merge it. Close it, and run again or ask the hub's operator.",
            )
        return Pushed(where, head.revision, committed, len(change.files))

    def _pull_request(self, bundle: Bundle) -> int | None:
        """Number of the bundle's open pull request: one that the token's owner opened, and nobody else."""
        me = str(self.api.whoami()["name"])
        found = self.api.get_repo_discussions(
            self.repository, repo_type="dataset", discussion_type="pull_request", author=me
        )
        for one in found:
            if (one.title, one.author) != (bundle.title, me) or one.status not in {"open", "draft"}:
                continue
            details = self.api.get_discussion_details(self.repository, one.num, repo_type="dataset")
            opening: Any = next((event for event in details.events if event.type == "comment"), None)
            # The marker has to be the text's last line: what stands above it may quote anything.
            last = str(getattr(opening, "content", None) or "").split()[-2:]
            if opening is not None and opening.author == me and " ".join(last) == bundle.marker:
                return int(one.num)
        return None

    def _commit(  # noqa: PLR0913, PLR0917 - one commit's worth
        self,
        bundle: Bundle,
        files: dict[str, bytes],
        gone: list[str],
        text: str,
        head: "HubRevision",
        number: int | None,
    ) -> int:
        """Commit to an open pull request, or (None) to a new one, and never to a branch; the number."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        adds = [
            CommitOperationAdd(path_in_repo=path, path_or_fileobj=data) for path, data in sorted(files.items())
        ]
        made = self.api.create_commit(
            self.repository,
            [*adds, *(CommitOperationDelete(path_in_repo=path) for path in gone)],
            commit_message=bundle.title,
            commit_description=text,
            repo_type="dataset",
            revision=None if number is None else f"refs/pr/{number}",
            create_pr=number is None,
            parent_commit=head.revision,
        )
        found = number if number is not None else made.pr_num
        if found is None:
            raise Again("the hub made no commit: it says that it holds these files, but lists others")
        return int(found)

    @cached_property
    def _token(self) -> str:
        from huggingface_hub import get_token

        token = get_token()
        if not token:
            todo = "Set HF_TOKEN for this command, or log in with `hf auth login`."
            raise TraceproofError(f"there is no token for {self.endpoint}", todo=todo)
        return token

    @cached_property
    def api(self) -> "HfApi":
        """The library's client, with the token."""
        from huggingface_hub import HfApi, logging, set_client_factory
        from huggingface_hub.utils._http import default_client_factory

        def bound(request: Any) -> None:  # noqa: ANN401 - httpx's or httpx2's, by the library's version
            times = dict.fromkeys(("read", "write", "pool"), READ_SECONDS)
            request.extensions["timeout"] = {"connect": CONNECT_SECONDS, **times}

        def client() -> Any:  # noqa: ANN401 - as above
            made = default_client_factory()
            made.event_hooks = {"request": [*made.event_hooks["request"], bound]}
            return made

        logging.set_verbosity(40)  # ERROR
        set_client_factory(client)
        return HfApi(endpoint=self.endpoint, token=self._token, library_name="traceproof")

    def ask(self, what: str, call: Callable[[], Result]) -> Result:
        """What a call of the library gives.

        Raises:
            Again: it failed in passing.
            TraceproofError: the hub refuses, or answers what the library stumbles over. Neither names the token.
        """
        from huggingface_hub.errors import HfHubHTTPError

        transport: type[Exception] = HfHubHTTPError.__mro__[1]  # HTTPError of httpx or httpx2
        try:
            found = call()
        except (transport, OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            # Of an upload, which runs in threads, the cause is what happened.
            cause = (error.__cause__ or error) if isinstance(error, RuntimeError) else error
            said = redacted(f"{type(cause).__name__}: {cause}".replace(self._token, "***"))[:400]
            if isinstance(cause, HfHubHTTPError):
                self._reached = True
                raise self._refusal(cause, " ".join(said.split())) from None
            if isinstance(cause, transport | OSError):
                raise Again(said, reached=self._reached) from None
            if isinstance(cause, RuntimeError) and not isinstance(cause, RecursionError):
                raise
            raise TraceproofError(
                f"{self.endpoint} was asked for {what}, and its answer is not what a hub answers",
                problems=[said],
                todo="Check the endpoint, or ask the hub's operator; nothing more was sent.",
            ) from None
        self._reached = True
        return found

    def _refusal(self, error: Any, said: str) -> Exception:  # noqa: ANN401 - HfHubHTTPError, imported late
        """What an answer with an error's status means."""
        status = error.response.status_code if error.response is not None else 0
        if status == BASE_MOVED:
            return Again(f"the base moved ({said})", wait=0.0)
        if status in PASSING:
            asked = error.response.headers.get("Retry-After", "")
            return Again(f"{status}: {said}", wait=float(asked) if re.fullmatch("[0-9]{1,9}", asked) else None)
        todo = "Check the repository's name and the endpoint."
        if status in REFUSED:
            todo = "The token must be valid and may open pull requests in this repository; nothing was committed."
        what = f"{self.endpoint} refused to take {self.repository} ({status})"
        return TraceproofError(what, problems=[said], todo=todo)


def _is_address(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        whole = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return whole and not has_credentials(endpoint)


class HubRevision:
    """A revision of a hub's repository, as a base."""

    def __init__(self, hub: Hub, name: str, scratch: Path) -> None:
        self._hub, self._scratch = hub, scratch

        def commit() -> str:
            return str(hub.api.repo_info(hub.repository, repo_type="dataset", revision=name).sha)

        self.revision = hub.ask(f"the revision {name}", commit)

    @cached_property
    def _tree(self) -> dict[str, Any]:
        from huggingface_hub.hf_api import RepoFile

        def listed() -> dict[str, Any]:
            found = self._hub.api.list_repo_tree(
                self._hub.repository, repo_type="dataset", revision=self.revision, recursive=True
            )
            return {item.path: item for item in found if isinstance(item, RepoFile)}

        return self._hub.ask("its files", listed)

    def paths(self) -> frozenset[str]:
        """All files."""
        return frozenset(self._tree)

    def read(self, path: str) -> bytes | None:
        """A file's content; None: it is not there."""
        if path not in self._tree:
            return None

        def fetched() -> bytes:
            local = self._hub.api.hf_hub_download(
                self._hub.repository, path, repo_type="dataset", revision=self.revision, cache_dir=self._scratch
            )
            return Path(local).read_bytes()

        return self._hub.ask(f"the file {path}", fetched)

    def holds(self, path: str, data: bytes) -> bool:
        """Whether it has exactly this file, by its digest."""
        item = self._tree.get(path)
        if item is None:
            return False
        if item.lfs is not None:
            return bool(item.lfs.sha256 == hashlib.sha256(data).hexdigest())
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()  # as git does
        return bool(item.blob_id == blob)


class Remote:
    """A git remote, with git's own credentials; its default branch is the base, and is never pushed to."""

    def __init__(self, url: str) -> None:
        if url.startswith("-"):
            raise TraceproofError(f"{url!r} is no git remote")
        self.url = url

    def push(self, bundle: Bundle, describe: Describe, *, allow_changes: bool) -> Pushed:
        """Bring the bundle's branch up to date with one commit.

        Raises TraceproofError: the remote can not be read or written, or the bundle does not go on top of it.
        """
        return _patiently(lambda: self._attempt(bundle, describe, allow_changes=allow_changes))

    def _attempt(self, bundle: Bundle, describe: Describe, *, allow_changes: bool) -> Pushed:
        branch = f"{PREFIX}{bundle.slug}"
        with tempfile.TemporaryDirectory() as scratch:
            git = Git(Path(scratch) / "clone", PATIENCE)
            what = ("--progress", "--no-checkout", "--no-tags", "--filter=blob:none", "--", self.url, "clone")
            Git(Path(scratch), PATIENCE).network("clone", *what)
            shown = ("--format=%(symref:lstrip=3)", "refs/remotes/origin/HEAD")
            default = git.local("for-each-ref", *shown).strip()
            base = GitRevision(git, default)
            if not base.revision:
                raise TraceproofError(f"{self.url} has no commit on its default branch")
            if branch == default:
                raise TraceproofError(f"{branch} is the default branch of {self.url}, which is never pushed to")
            change = _planned(bundle, base, allow_changes=allow_changes)
            if not change.files:
                return Pushed(redacted(self.url), base.revision, committed=False, files=0)
            self._refuse_lfs(git, base, change)
            tip = GitRevision(git, branch).revision
            tree = tree_with(git, base.revision, change.files)
            committed = not tip or git.local("rev-parse", f"{tip}^{{tree}}").strip() != tree
            head = tip
            if committed:
                parents = [tip] if tip else []
                if not tip or git.local("rev-list", "--max-count=1", base.revision, f"^{tip}").strip():
                    parents.append(base.revision)
                flags = [flag for parent in parents for flag in ("-p", parent)]
                message = f"{bundle.title}\n\n{describe(change)}"
                head = git.local("commit-tree", tree, *flags, data=message.encode()).strip()
                self._send(git, head, branch, tip)
        return Pushed(f"{redacted(self.url)} {branch}", head, committed, len(change.files))

    def _refuse_lfs(self, git: Git, base: "GitRevision", change: Change) -> None:
        """Say so where the remote keeps one of the files in LFS: a pointer without its object is a broken file."""
        names = "\0".join(change.files).encode()
        git.local("read-tree", base.revision)
        said = git.local("check-attr", "--cached", "-z", "--stdin", "filter", data=names).split("\0")
        kept = [path for path, _, value in zip(said[::3], said[1::3], said[2::3], strict=False) if value == "lfs"]
        if kept:
            raise TraceproofError(
                f"{self.url} keeps {len(kept)} of these files in LFS, which plain git can not fill",
                problems=kept[:10],
                todo="Push to the hub itself instead (--push).",
            )

    def _send(self, git: Git, commit: str, branch: str, tip: str) -> None:
        """Push to the bundle's branch, if it is where it was."""
        lease = f"--force-with-lease=refs/heads/{branch}:{tip}"
        try:
            git.network("push", "--progress", lease, self.url, f"{commit}:refs/heads/{branch}")
        except GitError as error:
            if re.search(MOVED, error.output):
                raise Again(error.output, wait=0.0) from error
            raise


class GitRevision:
    """A remote branch's commit in a clone, as a base; its `revision` is empty where there is no such branch."""

    def __init__(self, git: Git, branch: str) -> None:
        self._git = git
        name = f"refs/remotes/origin/{branch}"
        self.revision = git.local("for-each-ref", "--format=%(objectname)", name).strip()

    @cached_property
    def _paths(self) -> frozenset[str]:
        listed = self._git.local("ls-tree", "-r", "-z", "--name-only", self.revision)
        return frozenset(name for name in listed.split("\0") if name)

    def paths(self) -> frozenset[str]:
        """All files."""
        return self._paths

    def read(self, path: str) -> bytes | None:
        """A file's content; None: it is not there."""
        # The clone has no contents: git fetches one when it is read.
        return self._git.content("cat-file", "blob", f"{self.revision}:{path}") if path in self._paths else None
