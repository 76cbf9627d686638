"""Landlock: an unprivileged process takes file access from itself; works where namespaces are forbidden.

Source: linux/landlock.h. Version 1 came with Linux 5.13; later ones add rights and are used if present.
"""

import os
import stat
import struct
from collections.abc import Iterable

from traceproof.worker import kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK, TRUNCATE, IOCTL_DEV = 1 << 6, 1 << 11, 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
DEVICE = READ_FILE | WRITE_FILE | IOCTL_DEV
ON_FILES = (
    EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
)  # the rights that a file, not a folder, can have
RIGHTS_BY_VERSION = ((1, 13), (2, 14), (3, 15), (5, 16))  # from this version on so many rights
NET_BY_VERSION = (4, 0b11)  # bind and connect of TCP
SCOPE_BY_VERSION = (6, 0b11)  # abstract Unix sockets and signals only among the restricted
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1


def version() -> int:
    """Version of the interface. Raises OSError: the kernel has none, or it is switched off."""
    return kernel.syscall("landlock_create_ruleset", None, 0, VERSION_FLAG)


def restrict(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> None:
    """Leave this process only these folders and files; no_new_privs must be set. Absent paths are passed over.

    Raises OSError: the kernel refuses.
    """
    known = version()
    handled = (1 << max(count for least, count in RIGHTS_BY_VERSION if known >= least)) - 1
    net = NET_BY_VERSION[1] if known >= NET_BY_VERSION[0] else 0
    scope = SCOPE_BY_VERSION[1] if known >= SCOPE_BY_VERSION[0] else 0
    attributes = struct.pack("=QQQ", handled, net, scope)
    size = 24 if scope else 16 if net else 8  # an older kernel takes the shorter struct
    rules = kernel.syscall("landlock_create_ruleset", attributes, size, 0)
    try:
        for paths, rights in ((readable, READ), (writable, ~(MAKE_CHAR | MAKE_BLOCK)), (devices, DEVICE)):
            for path in paths:
                _allow(rules, path, rights & handled)
        kernel.syscall("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(beneath).st_mode):
            rights &= ON_FILES
        kernel.syscall("landlock_add_rule", rules, RULE_PATH_BENEATH, struct.pack("=Qi", rights, beneath), 0)
    finally:
        os.close(beneath)
