"""Asking a hub: the token, what its failures mean, and a revision of a repository with its files.

The only module that holds a token: huggingface_hub reads it (HF_TOKEN, or the hub's own login) in this process,
and whatever is said of a failure is cleared of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from traceproof.errors import TraceproofError
from traceproof.names import confined
from traceproof.publish.push import Again, silent
from traceproof.publish.transport import Watch, client_factory
from traceproof.text import has_credentials, redacted

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
HUB = "huggingface.co"
PASSING = frozenset({408, 429, 500, 502, 503, 504})
MOVED = 412
REFUSED = frozenset({401, 403})
COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
MOST_FILES = 500_000


class Connection:
    """Asking a hub about a dataset repository.

    Raises TraceproofError: the repository's name is none, the endpoint no address of a hub, or there is no token.
    """

    def __init__(
        self,
        repository: str,  # `<owner>/<name>`
        *,
        endpoint: str = "",  # the hub's address; empty: HF_ENDPOINT, or the public hub
        pause: Callable[[float], None] = time.sleep,
        say: Callable[[str], None] = silent,
    ) -> None:
        if not REPOSITORY.fullmatch(repository):
            raise TraceproofError(f"{repository!r} is no dataset repository", todo="Give it as <owner>/<name>.")
        self.repository = repository
        self.endpoint = (endpoint or os.environ.get("HF_ENDPOINT", "") or f"https://{HUB}").rstrip("/")
        if not _is_address(self.endpoint):
            todo = "Give it as https://<host>, without user, password or token; the token comes from HF_TOKEN."
            raise TraceproofError(f"{self.endpoint} is no address of a hub", todo=todo)
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
            todo = "Set HF_TOKEN for this command, or log in with `hf auth login`."
            raise TraceproofError(f"there is no token for {self.endpoint}", todo=todo)
        return token

    @cached_property
    def api(self) -> HfApi:
        """The library's client, with the token."""
        from huggingface_hub import HfApi, logging, set_client_factory
        from huggingface_hub.errors import HfHubHTTPError

        logging.set_verbosity(40)  # ERROR
        set_client_factory(client_factory(self.watch, HfHubHTTPError.__mro__[1]))
        return HfApi(endpoint=self.endpoint, token=self._token, library_name="traceproof")

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
    def errors(self) -> Iterator[None]:
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


class Revision:
    """A revision of the repository, as a base."""

    def __init__(self, hub: Connection, name: str, cache: Path) -> None:
        self._hub = hub
        self._cache = cache
        with hub.answer(f"the revision {name}"):
            info = hub.api.repo_info(hub.repository, repo_type="dataset", revision=name)
            self.revision = str(info.sha)
            if not COMMIT.fullmatch(self.revision):
                raise ValueError(f"{self.revision[:80]!r} is no commit")

    @cached_property
    def _tree(self) -> dict[str, Any]:
        from huggingface_hub.hf_api import RepoFile

        api = self._hub.api
        with self._hub.answer("its files"), self._hub.watch.listing():
            listed = api.list_repo_tree(
                self._hub.repository, repo_type="dataset", revision=self.revision, recursive=True
            )
            found = {item.path: item for item in islice(listed, MOST_FILES + 1) if isinstance(item, RepoFile)}
            if len(found) > MOST_FILES:
                raise ValueError(f"more than {MOST_FILES} files")
        return found

    def paths(self) -> frozenset[str]:
        """All files."""
        return frozenset(self._tree)

    def read(self, path: str) -> bytes | None:
        """A file's content; None: it is not there."""
        if path not in self._tree:
            return None
        api = self._hub.api
        with self._hub.answer(f"the file {path}"):
            local = api.hf_hub_download(
                self._hub.repository, path, repo_type="dataset", revision=self.revision, cache_dir=self._cache
            )
            confined(Path(local), within=self._cache)
        return Path(local).read_bytes()

    def holds(self, path: str, data: bytes) -> bool:
        """Whether it has exactly this file, by its digest."""
        item = self._tree.get(path)
        if item is None:
            return False
        if item.lfs is not None:
            return bool(item.lfs.sha256 == hashlib.sha256(data).hexdigest())
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()  # as git does
        return bool(item.blob_id == blob)
