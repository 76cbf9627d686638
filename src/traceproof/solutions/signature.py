"""Signs certificates: Ed25519 over the file's bytes, kept in a file beside it. Needs `cryptography`."""

import base64
import hashlib
import json
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from traceproof.errors import TraceproofError
from traceproof.files import MIB, read_bytes, write_text

SUFFIX = ".sig"  # added to the certificate's file name
MOST_BYTES = 64 * MIB
HOW = "openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out key.pub"


def private_key(file: Path) -> Ed25519PrivateKey:
    """Read an Ed25519 key from PEM without a password. Raises TraceproofError: the file has none."""
    try:
        found = serialization.load_pem_private_key(file.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise TraceproofError(f"{file} is no private key: {error}", todo=f"Make one: {HOW}") from None
    if not isinstance(found, Ed25519PrivateKey):
        raise TraceproofError(f"{file} is no Ed25519 key", todo=f"Make one: {HOW}")
    return found


def sign(certificate: Path, key: Ed25519PrivateKey) -> Path:
    """Sign a certificate's file; returns the path of the signature."""
    said = {"public_key": _text(key.public_key().public_bytes_raw())}
    said["signature"] = _text(key.sign(read_bytes(certificate, most=MOST_BYTES)))
    place = certificate.with_name(certificate.name + SUFFIX)
    write_text(place, json.dumps(said, indent=1) + "\n")
    return place


def check(certificate: Path, key: Path | None) -> str:
    """SHA-256 of the public key that signed a certificate; `key`: file (PEM) of the only accepted one.

    Raises TraceproofError: it is not signed, was changed since, or is signed by another key.
    """
    place = certificate.with_name(certificate.name + SUFFIX)
    try:
        said = json.loads(read_bytes(place, most=MIB))
        public = base64.b64decode(said["public_key"], validate=True)
        signature = base64.b64decode(said["signature"], validate=True)
        signer = Ed25519PublicKey.from_public_bytes(public)
        signer.verify(signature, read_bytes(certificate, most=MOST_BYTES))
        written = {"public_key": _text(public), "signature": _text(signature)}
    except InvalidSignature:
        raise TraceproofError(f"{certificate} is not what was signed") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        todo = "A certificate is signed when it is written: traceproof judge ... --sign KEY.pem"
        raise TraceproofError(f"{certificate} has no signature that can be read: {error}", todo=todo) from None
    if said != written:  # another encoding of the same bytes: base64's last letter has unused bits
        raise TraceproofError(f"{place} is not as it was written")
    if key is not None:
        try:
            wanted = serialization.load_pem_public_key(key.read_bytes())
        except (OSError, ValueError) as error:
            raise TraceproofError(f"{key} is no public key: {error}") from None
        if not isinstance(wanted, Ed25519PublicKey) or wanted.public_bytes_raw() != public:
            raise TraceproofError(f"{certificate} is signed by another key than {key}")
    return hashlib.sha256(public).hexdigest()


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
