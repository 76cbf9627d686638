"""Pushing to a dataset on a hub: a pull request with one commit, found again on the next run.

The only module that holds a token: huggingface_hub reads it (HF_TOKEN, or the hub's own login) in this process,
and whatever is said of a failure is cleared of it.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from traceproof.errors import TraceproofError
from traceproof.publish.bundle import Bundle
from traceproof.publish.change import Change
from traceproof.publish.push import Again, Outcome, patiently, planned, silent, unlike
from traceproof.publish.revision import Revision
from traceproof.publish.transport import Watch, client_factory
from traceproof.text import has_credentials, redacted

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
PULL_REQUEST = re.compile(r"refs/pr/[1-9][0-9]*")
MAIN = "main"
HUB = "huggingface.co"
OPEN = frozenset({"open", "draft"})
PASSING = frozenset({408, 429, 500, 502, 503, 504})
MOVED = 412
REFUSED = frozenset({401, 403})


class Hub:
    """A dataset repository on a hub.

    Args:
        repository: `<owner>/<name>`.
        endpoint: the hub's address; empty: HF_ENDPOINT, or the public hub.

    Raises:
        TraceproofError: the repository's name is none, the endpoint no address of a hub, or there is no token.
    """

    def __init__(
        self,
        repository: str,
        *,
        endpoint: str = "",
        pause: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = silent,
    ) -> None:
        if not REPOSITORY.fullmatch(repository):
            raise TraceproofError(f"{repository!r} is no dataset repository", todo="Give it as <owner>/<name>.")
        self.repository = repository
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT", "") or f"https://{HUB}").rstrip("/")
        if not _is_address(self.endpoint):
            raise TraceproofError(
                f"{self.endpoint} is no address of a hub",
                todo="Give it as https://<host>, without user, password or token; the token comes from HF_TOKEN.",
            )
        self.watch = Watch(self.endpoint)
        self.pause, self.say = pause, say
        if urlsplit(self.endpoint).hostname != HUB:
            os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # read when huggingface_hub is imported
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    @cached_property
    def _token(self) -> str:
        from huggingface_hub import get_token

        token = get_token()
        if not token:
            raise TraceproofError(
                f"there is no token for {self.endpoint}",
                todo="Set HF_TOKEN for this command, or log in with `hf auth login`.",
            )
        return token

    @cached_property
    def api(self) -> HfApi:
        """The library's client, with the token."""
        from huggingface_hub import HfApi, logging, set_client_factory
        from huggingface_hub.errors import HfHubHTTPError

        logging.set_verbosity(40)  # ERROR
        set_client_factory(client_factory(self.watch, HfHubHTTPError.__mro__[1]))
        return HfApi(endpoint=self.endpoint, token=self._token, library_name="traceproof")

    def push(self, bundle: Bundle, describe: Callable[[Change], str], *, allow_changes: bool) -> Outcome:
        """Open the bundle's pull request, or bring the one that is open up to date, and read it back.

        Raises:
            TraceproofError: no write rights, a conflict with what is there, a server that gives up or that holds
                something else than it was sent.
        """
        self.say(f"{bundle.slug}: asking {self.endpoint} what {self.repository} holds")
        return patiently(
            lambda: self._attempt(bundle, describe, allow_changes=allow_changes), pause=self.pause, say=self.say
        )

    def _attempt(self, bundle: Bundle, describe: Callable[[Change], str], *, allow_changes: bool) -> Outcome:
        with self._errors(), tempfile.TemporaryDirectory() as scratch:
            main = Revision(self, MAIN, Path(scratch) / "main")
            change = planned(bundle, main, allow_changes=allow_changes)
            number = self._pull_request(bundle)
            self.say(f"{bundle.slug}: {len(change.files)} files differ from {self.repository}")
            if not change.files:
                return Outcome(f"{self.endpoint}/datasets/{self.repository}", main.revision, False, 0)  # noqa: FBT003
            if number is None:
                info = self._commit(
                    bundle, change.files, [], describe(change), parent=main.revision, revision=None
                )
                if info.pr_num is None:
                    raise TraceproofError(
                        f"{self.endpoint} made no commit: it says that it holds these files, but lists others",
                        problems=sorted(change.files),
                        todo="Ask the hub's operator; nothing was committed.",
                    )
                reference, committed = f"refs/pr/{info.pr_num}", True
            else:
                reference = f"refs/pr/{number}"
                committed = self._update(bundle, change, main, reference, describe(change))
            head = Revision(self, reference, Path(scratch) / "head")
            # By digest first: what is listed otherwise need not be downloaded.
            different = [
                f"{path}: listed otherwise" for path, data in change.files.items() if not head.holds(path, data)
            ]
            different = different or unlike(change.files, head.read)
        where = f"{self.endpoint}/datasets/{self.repository}/discussions/{reference.rpartition('/')[2]}"
        if different:
            raise TraceproofError(
                f"{where} does not hold what was sent: the server's copy differs",
                problems=different,
                todo="Do not merge it. Close it, and run again or ask the hub's operator.",
            )
        return Outcome(where, head.revision, committed, len(change.files))

    def _update(self, bundle: Bundle, change: Change, main: Revision, reference: str, text: str) -> bool:
        """One commit on an open pull request, if it holds anything else than the change; whether there was one."""
        with tempfile.TemporaryDirectory() as scratch:
            head = Revision(self, reference, Path(scratch))
            wrong = {path: data for path, data in change.files.items() if not head.holds(path, data)}
            stale = sorted(head.paths() - main.paths() - change.files.keys())
            if not wrong and not stale:
                return False
            self._commit(bundle, wrong, stale, text, parent=head.revision, revision=reference)
            return True

    def _commit(  # noqa: PLR0913 - one commit's worth
        self,
        bundle: Bundle,
        files: dict[str, bytes],
        gone: list[str],
        text: str,
        *,
        parent: str,
        revision: str | None,
    ) -> Any:  # noqa: ANN401 - the library's record
        """Commit to a new pull request (no revision) or to an open one's reference; never to anything else.

        Raises:
            ValueError: the revision is a branch.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        if revision is not None and not PULL_REQUEST.fullmatch(revision):
            raise ValueError(f"{revision} is no pull request; nothing is ever pushed to a branch of the dataset")
        adds = [
            CommitOperationAdd(path_in_repo=path, path_or_fileobj=data) for path, data in sorted(files.items())
        ]
        deletes = [CommitOperationDelete(path_in_repo=path) for path in gone]
        with self.answer("a commit"):
            return self.api.create_commit(
                self.repository,
                [*adds, *deletes],
                commit_message=bundle.title,
                commit_description=text,
                repo_type="dataset",
                revision=revision,
                create_pr=revision is None,
                parent_commit=parent,
            )

    def _pull_request(self, bundle: Bundle) -> int | None:
        """Number of the bundle's open pull request: one that the token's owner opened, and nobody else."""
        with self.answer("whose the token is"):
            me = str(self.api.whoami()["name"])
        with self.answer("pull requests"), self.watch.listing():
            found = self.api.get_repo_discussions(
                self.repository, repo_type="dataset", discussion_type="pull_request", author=me
            )
            for discussion in found:
                ours = discussion.title == bundle.title and discussion.author == me
                if not ours or discussion.status not in OPEN:
                    continue
                details = self.api.get_discussion_details(self.repository, discussion.num, repo_type="dataset")
                opening = [event for event in details.events if event.type == "comment"][:1]
                if any(event.author == me and _ends_with(event, bundle.marker) for event in opening):
                    return int(discussion.num)
        return None

    @contextmanager
    def answer(self, what: str) -> Iterator[None]:
        """Tell of an answer that is none: the library takes any JSON for what it asked for, and stumbles."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, OSError):  # HTTP errors of some libraries, with another base as well
                raise
            said = self._clean(f"{type(error).__name__}: {error}")
            raise TraceproofError(
                f"{self.endpoint} was asked for {what}, and its answer is not what a hub answers",
                problems=[said],
                todo="Check the endpoint, or ask the hub's operator; nothing more was sent.",
            ) from None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Tell failures that pass from those that do not; neither names the token."""
        from huggingface_hub.errors import HfHubHTTPError

        transport: type[Exception] = HfHubHTTPError.__mro__[
            1
        ]  # HTTPError of whichever client the library is built on

        try:
            yield
        except HfHubHTTPError as error:
            self._http_error(error)
        except (transport, OSError) as error:
            said = self._clean(f"{type(error).__name__}: {error}")
            raise Again(said, reached=self.watch.reached) from None
        except RuntimeError as error:  # an upload in a thread; the cause is what happened
            cause = error.__cause__
            if isinstance(cause, HfHubHTTPError):
                self._http_error(cause)
            if isinstance(cause, TraceproofError):
                raise cause from None
            if isinstance(cause, (transport, OSError)):
                raise Again(self._clean(f"{type(cause).__name__}: {cause}")) from None
            raise

    def _http_error(self, error: Any) -> None:  # noqa: ANN401 - HfHubHTTPError, imported late
        status = error.response.status_code if error.response is not None else 0
        said = self._clean(" ".join(str(error).split()))
        if status == MOVED:
            raise Again(f"the base moved ({said})", wait=0.0) from None
        if status in PASSING:
            asked = error.response.headers.get("Retry-After", "")
            raise Again(f"{status}: {said}", wait=float(asked) if asked.isdigit() else None) from None
        todo = "Check the repository's name and the endpoint."
        if status in REFUSED:
            todo = "The token must be valid and may open pull requests in this repository; nothing was committed."
        raise TraceproofError(
            f"{self.endpoint} refused to take {self.repository} ({status})", problems=[said], todo=todo
        ) from None

    def _clean(self, text: str) -> str:
        return redacted(text.replace(self._token, "***"))[:400]


def _is_address(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        whole = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return whole and not has_credentials(endpoint)


def _ends_with(event: Any, marker: str) -> bool:  # noqa: ANN401 - the library's record
    """Whether the marker is a comment's last line: what stands above it may quote anything."""
    lines = str(getattr(event, "content", None) or "").split()
    return " ".join(lines[-2:]) == marker
