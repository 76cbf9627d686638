"""Escapes untrusted text for a terminal, a log or a document; no other module does."""

import math
import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

HIDDEN = "***"
MESSAGE_CHARACTERS = 8000
SECRET_WORDS = ("token", "secret", "password", "passwd", "credential", "api_key", "apikey", "access_key")
SIGNATURES = frozenset(
    {"key", "sig", "signature", "auth", "pass", "pwd", "jwt", "x-amz-signature", "x-goog-signature"}
)
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>|\\^`{}]+")
HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
MARKUP = re.compile(r"([\\`*\[\]|#~$])")
ENTITIES = str.maketrans({sign: f"&#{ord(sign)};" for sign in "{}<&@"})  # MDX evaluates braces
QUOTED = str.maketrans({"\\": "\\\\", '"': '\\"'})


def names(text: str) -> frozenset[str]:
    """The words of a text as a set: `"q k v"`."""
    return frozenset(text.split())


def printable(text: str) -> str:
    """`text` on one line with control characters escaped: untrusted text must not steer the terminal."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def plain_text(text: str, most: int = MESSAGE_CHARACTERS) -> str:
    """The end of `text`, `most` characters, without lone surrogates, so that any file can hold it."""
    return text[-most:].encode("utf-8", errors="backslashreplace").decode("utf-8")


def block(text: str, indent: str = "    ") -> str:
    """`text` with printable lines, all but the first indented, so that none looks like a line of ours."""
    return f"\n{indent}".join(map(printable, text.split("\n")))


def markdown(text: str) -> str:
    """`text` on one line, escaped for a Markdown or MDX document or a cell of its table."""
    return MARKUP.sub(r"\\\1", printable(text)).translate(ENTITIES)


def literal(value: object, *plain: type) -> str:
    """A string, a number, or a tuple, list or mapping of them as Python source, with double quotes.

    Values of the types `plain` are written by `repr`. Raises TypeError: a value is none of these.
    """
    if isinstance(value, str):
        return f'"{unquoted(value)}"'
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or type(value) in {bool, int, float, *plain}:
        return repr(value)
    if isinstance(value, Mapping):
        pairs = (f"{literal(key, *plain)}: {literal(item, *plain)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, tuple | list):
        items = ", ".join(literal(item, *plain) for item in value)
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    raise TypeError(f"{type(value).__name__} has no literal here")


def unquoted(text: str) -> str:
    """`text` escaped for the inside of a string literal or docstring in double quotes."""
    return "".join(
        sign.translate(QUOTED) if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )


def says_secret(name: str) -> bool:
    """Whether a variable, option or query key of this name probably holds a secret."""
    lower = name.lower().replace("-", "_")
    return any(word in lower for word in SECRET_WORDS) or name.lower() in SIGNATURES


def redacted(text: str) -> str:
    """`text` without the credentials in its URLs (user, password, secrets of the query) and without hub tokens."""
    return HUB_TOKEN.sub(HIDDEN, URL.sub(lambda match: _redacted_url(match[0]), text))


def has_credentials(url: str) -> bool:
    """Whether a URL has a password or a token; the user of an ssh address is none."""
    try:
        parts = urlsplit(url)
    except ValueError:  # it only looks like a URL
        return "@" in url
    alone = parts.scheme in {"ssh", "git+ssh", "ssh+git"} and ":" not in parts.netloc.rpartition("@")[0]
    return ("@" in parts.netloc and not alone) or any(says_secret(key) for key, _ in parse_qsl(parts.query))


def of_files(message: str) -> str:
    """A message of pydantic in the words of YAML and JSON: a list, no tuple; a mapping, no dictionary or class."""
    message = message.replace("valid tuple", "valid list").replace("Tuple should", "List should")
    return re.sub(r"dictionary( or (instance|object) .*)?$", "mapping", message)


def _redacted_url(url: str) -> str:
    """A URL without its user, password and secrets of the query."""
    try:
        parts = urlsplit(url)
    except ValueError:  # looks like a URL but is not one, so only the scheme is shown
        return url.partition("://")[0] + f"://{HIDDEN}"
    if not has_credentials(url):
        return url
    query = urlencode(
        [
            (key, HIDDEN if says_secret(key) else value)
            for key, value in parse_qsl(parts.query, keep_blank_values=True)
        ],
        quote_via=lambda value, *_: quote(value, safe="*"),
    )
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=query))
