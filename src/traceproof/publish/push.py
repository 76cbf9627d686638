"""Sending a pull request to a hub.

Each attempt reads the dataset's present state, compares, and makes at most one commit; if its answer is lost, the
next attempt finds the commit. No rule, script or stage imports this module.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_exponential
from tenacity.wait import wait_base

from traceproof.errors import TraceproofError
from traceproof.publish.pull_request import PullRequest, checked
from traceproof.text import has_credentials, redacted

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")
TRIES = 8
PAUSES = wait_exponential(max=120)  # seconds, from 1; the hub limits rates over minutes
REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
HUB = "https://huggingface.co"
BASE_MOVED = 412
# HTTP statuses after which another attempt may succeed
PASSING = frozenset({408, BASE_MOVED, 429, 500, 502, 503, 504})
REFUSED = frozenset({401, 403})


@dataclass(frozen=True, slots=True)
class Pushed:
    """Result of a push."""

    where: str  # address of the pull request, or of the dataset if that holds everything
    committed: bool  # whether a commit was made
    files: int  # number of files that the pull request changes


class Hub:
    """A dataset repository on a hub, and pull requests to it.

    Only this class handles a token: huggingface_hub reads it (HF_TOKEN, or the hub's login), and it is removed
    from all messages. Raises TraceproofError: the repository's name or the endpoint is invalid, or there is no
    token.
    """

    def __init__(
        self,
        repository: str,  # `<owner>/<name>`
        *,
        endpoint: str = "",  # empty: HF_ENDPOINT, or the public hub
        pauses: wait_base = PAUSES,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        if not REPOSITORY.fullmatch(repository):
            raise TraceproofError(f"{repository!r} is no dataset repository", todo="Give it as <owner>/<name>.")
        self.repository = repository
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT", "") or HUB).rstrip("/")
        if not re.match(r"https?://[^/]+", self.endpoint) or has_credentials(self.endpoint):
            todo = "Give it as https://<host>, without user, password or token; the token comes from HF_TOKEN."
            raise TraceproofError(f"{self.endpoint} is no address of a hub", todo=todo)
        self._pauses, self._say = pauses, say
        if self.endpoint != HUB:
            os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # read when huggingface_hub is imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from huggingface_hub import get_token

        self._token = get_token() or ""
        if not self._token:
            todo = "Set HF_TOKEN for this command, or log in with `hf auth login`."
            raise TraceproofError(f"there is no token for {self.endpoint}", todo=todo)

    @cached_property
    def api(self) -> "HfApi":
        """The library's client, with the token."""
        from huggingface_hub import HfApi, logging

        logging.set_verbosity(40)  # ERROR
        return HfApi(endpoint=self.endpoint, token=self._token, library_name="traceproof")

    @cached_property
    def owner(self) -> str:
        """Name of the token's owner. Raises TraceproofError: the token is invalid, or the hub does not answer."""
        return self._asked(lambda: str(self.api.whoami()["name"]))

    def push(self, made: PullRequest, *, allow_changes: bool) -> Pushed:
        """Open the pull request, or update the one that is open.

        Raises TraceproofError: no rights, a conflict with the dataset, or a server that keeps failing.
        """
        self._say(f"{made.slug}: asking {self.endpoint} what {self.repository} holds as {self.owner}")
        return self._asked(lambda: self._attempt(made, allow_changes=allow_changes))

    def _asked(self, request: Callable[[], T]) -> T:
        """The result of a request, made again while that may help. Raises TraceproofError: it does not."""
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        transport: type[Exception] = HfHubHTTPError.__mro__[1]  # HTTPError of httpx or httpx2

        def passing(error: BaseException) -> bool:
            if isinstance(error, HfHubHTTPError):
                return error.response is not None and error.response.status_code in PASSING
            if isinstance(error, OfflineModeIsEnabled):
                return False
            return isinstance(error, transport | OSError) or isinstance(error.__cause__, transport | OSError)

        def again(state: RetryCallState) -> None:
            assert state.outcome is not None
            why = self._one_line(state.outcome.exception())[:200]
            self._say(f"attempt {state.attempt_number} of {TRIES} failed ({why}); trying again")

        stop, retry = stop_after_attempt(TRIES), retry_if_exception(passing)
        attempts = Retrying(retry=retry, stop=stop, wait=self._pauses, before_sleep=again, reraise=True)
        try:
            return attempts(request)
        except (transport, OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
            # The library raises RuntimeError for a failed upload, the others for answers that no hub gives.
            status = getattr(getattr(error, "response", None), "status_code", 0)
            todo = "Check the repository's name and the endpoint."
            if status in REFUSED:
                todo = "The token must be valid and may open pull requests in this repository."
            elif isinstance(error, OfflineModeIsEnabled):
                todo = "Unset HF_HUB_OFFLINE for this command."
            elif passing(error):
                todo = "Run the same command again later: what was uploaded is not uploaded twice."
            what = f"not published: {self.endpoint} did not take {self.repository}"
            raise TraceproofError(what, problems=[self._one_line(error)], todo=todo) from None

    def _one_line(self, error: BaseException | None) -> str:
        """An error in one line, without the token."""
        return " ".join(redacted(f"{type(error).__name__}: {error}".replace(self._token, "***"))[:400].split())

    def _attempt(self, made: PullRequest, *, allow_changes: bool) -> Pushed:
        """Commit what differs to the open pull request, or to a new one. Raises as the hub's client does."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        with tempfile.TemporaryDirectory() as scratch:
            main = HubRevision(self, "main", Path(scratch))
            change = checked(made, main, allow_changes=allow_changes)
            self._say(f"{made.slug}: {len(change.files)} files differ from {self.repository}")
            where = f"{self.endpoint}/datasets/{self.repository}"
            if not change.files:
                return Pushed(where, committed=False, files=0)
            number = self._open(made)
            head = main if number is None else HubRevision(self, f"refs/pr/{number}", Path(scratch))
            missing = {path: data for path, data in change.files.items() if not head.holds(path, data)}
            stale = sorted(head.paths() - main.paths() - change.files.keys())
            if missing or stale:  # to an open pull request, or a new one (None), never to a branch
                adds = (CommitOperationAdd(path_in_repo=p, path_or_fileobj=data) for p, data in missing.items())
                done = self.api.create_commit(
                    self.repository,
                    [*adds, *(CommitOperationDelete(path_in_repo=path) for path in stale)],
                    commit_message=made.title,
                    commit_description=made.describe(change),
                    repo_type="dataset",
                    revision=None if number is None else f"refs/pr/{number}",
                    create_pr=number is None,
                    parent_commit=head.revision,
                )
                number = done.pr_num if number is None else number
        return Pushed(f"{where}/discussions/{number}", bool(missing or stale), len(change.files))

    def _open(self, made: PullRequest) -> int | None:
        """Number of the pull request that the token's owner has open; None: there is none."""
        threads = self.api.get_repo_discussions(
            self.repository, repo_type="dataset", discussion_type="pull_request", author=self.owner
        )
        for thread in threads:
            if (thread.title, thread.author) != (made.title, self.owner) or thread.status not in {"open", "draft"}:
                continue
            details = self.api.get_discussion_details(self.repository, thread.num, repo_type="dataset")
            opening: Any = next((event for event in details.events if event.type == "comment"), None)
            # The marker must be the last line: text above it may quote anything.
            last = str(getattr(opening, "content", None) or "").split()[-2:]
            if opening is not None and opening.author == self.owner and " ".join(last) == made.marker:
                return int(thread.num)
        return None


class HubRevision:
    """A revision of a hub's repository, as a Base."""

    def __init__(self, hub: Hub, name: str, scratch: Path) -> None:
        self._hub, self._scratch = hub, scratch
        self.revision = str(hub.api.repo_info(hub.repository, repo_type="dataset", revision=name).sha)

    @cached_property
    def _tree(self) -> dict[str, Any]:
        from huggingface_hub.hf_api import RepoFile

        files = self._hub.api.list_repo_tree(
            self._hub.repository, repo_type="dataset", revision=self.revision, recursive=True
        )
        return {item.path: item for item in files if isinstance(item, RepoFile)}

    def paths(self) -> frozenset[str]:
        """Paths of all files."""
        return frozenset(self._tree)

    def read(self, path: str) -> bytes | None:
        """A file's content; None: it is not there."""
        if path not in self._tree:
            return None
        local = self._hub.api.hf_hub_download(
            self._hub.repository, path, repo_type="dataset", revision=self.revision, cache_dir=self._scratch
        )
        return Path(local).read_bytes()

    def holds(self, path: str, data: bytes) -> bool:
        """Whether it has exactly this file, by digest."""
        item = self._tree.get(path)
        if item is None:
            return False
        if item.lfs is not None:
            return bool(item.lfs.sha256 == hashlib.sha256(data).hexdigest())
        # git's digest of a blob
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        return bool(item.blob_id == blob)
