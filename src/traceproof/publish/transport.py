"""The HTTP client that the hub's library gets: bounds on answers, and a token that goes to the hub alone.

huggingface_hub sets no timeouts, follows what it is told to, reads answers of any size, and takes an ETag for part
of a path. A server is somebody else's program, so what it answers is checked here, before the library sees it.
"""

import importlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from traceproof.errors import TraceproofError

CONNECT_SECONDS, READ_SECONDS = 5.0, 60.0
ANSWER_SECONDS = 900.0  # for one answer, however it comes in
JSON_BYTES, FILE_BYTES = 64 << 20, 4 << 30
MOST_REQUESTS = 500  # of one listing
# What huggingface_hub makes folders and files of its cache of.
PATH_HEADERS = ("etag", "x-linked-etag", "x-repo-commit")
DIGEST = re.compile(r'(W/)?"?[A-Za-z0-9][A-Za-z0-9_-]{0,127}"?')
DOWNLOAD = re.compile(r"/resolve/")
CREDENTIALS = ("authorization", "cookie")


class Watch:
    """What is known of the requests of a process to one hub."""

    def __init__(self, endpoint: str) -> None:
        self.origin = _origin(endpoint)  # scheme, host and port of the hub
        self.reached = False  # whether it ever answered
        self.left: int | None = None  # requests that the listing at hand may still make; None: no listing is made

    @contextmanager
    def listing(self) -> Iterator[None]:
        """Let what is listed inside take no more than MOST_REQUESTS."""
        self.left = MOST_REQUESTS
        try:
            yield
        finally:
            self.left = None

    def begin(self, request: Any) -> None:  # noqa: ANN401 - httpx's request
        """Check a request. Raises TraceproofError: it takes a token elsewhere, or a listing takes too many."""
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise _unusable(request, f"a listing of more than {MOST_REQUESTS} pages")
        if _origin(str(request.url)) != self.origin:
            held = [name for name in CREDENTIALS if name in request.headers]
            if held:
                raise _unusable(request, f"a request with {held[0]} would leave {self.origin[1]}")

    def answered(self, request: Any, response: Any) -> None:  # noqa: ANN401 - httpx's
        """Before an answer is read. Raises TraceproofError: its headers lead elsewhere."""
        self.reached = True
        target = response.headers.get("location")
        if (
            target
            and _origin(str(request.url.join(target))) != self.origin
            and not DOWNLOAD.search(request.url.path)
        ):
            raise _unusable(request, f"a redirect to {urlsplit(target).hostname or target[:80]}")
        for name in PATH_HEADERS:
            value = response.headers.get(name)
            if value is not None and not DIGEST.fullmatch(value):
                raise _unusable(request, f"the {name} {value[:80]!r}")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise _unusable(request, "a compressed answer, which nobody asked for")
        if int(response.headers.get("content-length") or 0) > _most(request):
            raise _unusable(request, f"more than {_most(request) >> 20} MiB")


def client_factory(watch: Watch, library: type[Exception]) -> Callable[[], Any]:
    """A function that makes HTTP clients for huggingface_hub, which tell `watch` of every request.

    `library` is an exception of the HTTP library that it is built on: httpx, or httpx2.
    """
    httpx: Any = importlib.import_module(library.__module__.partition(".")[0])

    class Stream(httpx.SyncByteStream):  # type: ignore[misc] # the library is known at run time
        """An answer's content, no longer than it may be."""

        def __init__(self, stream: Any, request: Any) -> None:  # noqa: ANN401 - httpx's
            self._stream, self._request = stream, request

        def __iter__(self) -> Iterator[bytes]:
            size, end = 0, time.monotonic() + ANSWER_SECONDS
            for piece in self._stream:
                size += len(piece)
                if size > _most(self._request):
                    raise _unusable(self._request, f"more than {_most(self._request) >> 20} MiB")
                if time.monotonic() > end:
                    raise httpx.ReadTimeout(f"no whole answer after {ANSWER_SECONDS:g} s", request=self._request)
                yield piece

        def close(self) -> None:
            """Close the connection's side of it."""
            self._stream.close()

    def begin(request: Any) -> None:  # noqa: ANN401 - httpx's
        request.headers["Accept-Encoding"] = "identity"
        request.extensions["timeout"] = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS).as_dict()
        watch.begin(request)

    def check(response: Any) -> None:  # noqa: ANN401 - httpx's
        watch.answered(response.request, response)
        response.stream = Stream(response.stream, response.request)

    hooks = {"request": [begin], "response": [check]}  # called for each redirect as well, before content is read
    return lambda: httpx.Client(event_hooks=hooks, follow_redirects=True, max_redirects=5)


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname or "", parts.port or default


def _most(request: Any) -> int:  # noqa: ANN401 - httpx's request
    """Bytes that the answer may have."""
    return (
        FILE_BYTES if DOWNLOAD.search(request.url.path) or "authorization" not in request.headers else JSON_BYTES
    )


def _unusable(request: Any, what: str) -> TraceproofError:  # noqa: ANN401 - httpx's request
    return TraceproofError(
        f"{request.url.host} answered {request.method} {request.url.path[:200]} with what no hub answers: {what}",
        todo="Check the endpoint, or ask the hub's operator; nothing more was sent.",
    )
