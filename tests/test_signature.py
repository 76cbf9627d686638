"""A signed certificate is refused once a byte of it changes, or where another key was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from traceproof.cli import main
from traceproof.errors import TraceproofError
from traceproof.solutions.signature import check, private_key, sign

TEXT = '{"solution": "mine", "verdict": "accepted"}'


def key_files(folder: Path, name: str) -> tuple[Path, Path]:
    """A new key in PEM: private, public."""
    key = Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    none = serialization.NoEncryption()
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def code(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as leaving:
        main(["check-certificate", *arguments])
    return leaving.value.code


def test_every_byte_counts_and_the_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(TEXT, encoding="utf-8")
    mine, public = key_files(tmp_path, "mine")
    _, other = key_files(tmp_path, "other")
    with pytest.raises(TraceproofError, match="has no signature"):
        check(file, None)
    place = sign(file, private_key(mine))
    assert check(file, None) == check(file, public)
    assert code(str(file), "--key", str(public)) == 0
    with pytest.raises(TraceproofError, match="another key"):
        check(file, other)
    assert code(str(file), "--key", str(other)) == 2
    for at in range(len(TEXT)):
        changed = bytearray(TEXT.encode())
        changed[at] ^= 1
        file.write_bytes(changed)
        with pytest.raises(TraceproofError, match="not what was signed"):
            check(file, None)
    file.write_text(TEXT, encoding="utf-8")
    signed = place.read_bytes()
    for at in range(len(signed)):
        place.write_bytes(signed[:at] + bytes([signed[at] ^ 1]) + signed[at + 1 :])
        try:
            check(file, public)
        except TraceproofError:
            continue
        assert chr(signed[at]).isspace(), at


def test_what_is_no_key_is_told(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("no key", encoding="utf-8")
    for name in ("key.pem", "absent.pem"):
        with pytest.raises(TraceproofError, match="is no private key"):
            private_key(tmp_path / name)
