"""API keys and their names: the name of a request's key is its tenant.

Keys come from flags and from files: a file of `name: key` lines, or a folder with one file for each key, as Kubernetes
mounts a Secret. Changed files are read again while the server runs. Only SHA-256 digests of keys are compared: the
digest of a request's key with every digest, in constant time, so that the duration reveals nothing. Messages never
contain a key.
"""

import errno
import hashlib
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.hashing import unnamed_tenant

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
SECRET_REVISION = "..data"
#: The tenant of callers without a key, in metrics and logs. No key has such a name.
KEYLESS = "(keyless)"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

#: Resolved path, mtime, inode and size of each file. They change with the content, and with the target of a symlink.
Signature = tuple[tuple[str, int, int, int], ...]


def tenant_label(name: str) -> str:
    """Return the name of a tenant as metrics and logs show it."""
    return name or KEYLESS


class FileWatch:
    """Detects changes of files. Unreadable files count as absent."""

    def __init__(self, paths: Iterable[Path], clock: Callable[[], float]) -> None:
        self.paths = tuple(paths)
        self._clock = clock
        self._signature = self._read_signature()
        self._checked_s = clock()

    def has_changed(self) -> bool:
        """True if the files changed since the last check. Checks at most once per `CHECK_EVERY_S`."""
        now = self._clock()
        if not self.paths or now - self._checked_s < CHECK_EVERY_S:
            return False
        self._checked_s = now
        before, self._signature = self._signature, self._read_signature()
        return self._signature != before

    def _read_signature(self) -> Signature:
        return tuple(entry for path in self.paths for entry in _signature(path))


def read_watched(path: Path) -> bytes:
    """Read a file that a `FileWatch` follows. Raises OSError, also for a pipe or a device, which may never end."""
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, which cannot be read again: name a regular file")
        return file.read()


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


class ApiKeys:
    """The valid keys, from flags (`keys`) and files (`paths`). `kind`: name of the keys in messages.

    Raises StartupError for an unusable file. If a file becomes unusable later, this is logged, and the keys stay valid.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        paths: Iterable[Path] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[Path], dict[str, str]] | None = None,
        kind: str = "API keys",
    ) -> None:
        keys = tuple(keys)
        if not all(key.strip() for key in keys):
            raise StartupError(f"one of the {kind} is empty, which would admit every client: remove the empty one.")
        self._given = {unnamed_tenant(key): key for key in keys}
        self._files = FileWatch(paths, clock)
        self._read_path = read or read_keys
        self._kind = kind
        self._digests = self._read()

    def __len__(self) -> int:
        return len(self._digests)

    def tenant_of(self, key: bytes) -> str | None:
        """Return the name of a key, or None if the key is not valid."""
        self._refresh()
        sent = _digest(key)
        matches = [name for name, digest in self._digests.items() if secrets.compare_digest(sent, digest)]
        return matches[0] if matches else None

    def _refresh(self) -> None:
        if not self._files.has_changed():
            return
        try:
            self._digests = self._read()
        except StartupError as error:
            logger.error("the %s were not reloaded, the previous ones stay valid: %s", self._kind, error)
        else:
            logger.info("reloaded the %s: %d are valid", self._kind, len(self._digests))

    def _read(self) -> dict[str, bytes]:
        keys = dict(self._given)
        for path in self._files.paths:
            for name, key in self._read_path(path).items():
                if keys.get(name, key) != key:
                    raise StartupError(f"{path}: the name {name!r} is given to two keys: each key needs its own name.")
                keys[name] = key
        digests = {name: _digest(key.encode()) for name, key in keys.items()}
        if len(set(digests.values())) != len(digests):
            raise StartupError("two names have the same API key: each name needs its own key.")
        return digests


def read_keys(path: Path) -> dict[str, str]:
    """Read the keys of a file or folder: name -> key. Raises StartupError, whose message never contains a key."""
    try:
        if path.is_dir():
            return {file.name: _checked(file.name, read_watched(file).decode(), file) for file in _entries(path)}
        return _parse(read_watched(path).decode(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read API keys from {path}: {reason_unread(error)}.") from None


def _parse(text: str, path: Path) -> dict[str, str]:
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.match(r"\s*([^:=\s]+)\s*[:=](.*)", line)
        if match is None:
            raise StartupError(f"{path}, line {number}: expected `name: key`.")
        name, key = match.groups()
        if name in keys:
            raise StartupError(f"{path}, line {number}: the name {name!r} is given twice.")
        keys[name] = _checked(name, key, f"{path}, line {number}")
    return keys


def _checked(name: str, text: str, place: object) -> str:
    key = text.strip().strip("\"'")
    if not _NAME.fullmatch(name):
        raise StartupError(f"{place}: a name has at most 64 characters: letters, digits, '.', '_' and '-'.")
    if not key.strip("="):
        raise StartupError(f"{place}: the key is empty.")
    return key


def _entries(folder: Path) -> list[Path]:
    """Files of the folder whose names begin with no dot: Kubernetes' own links begin with one."""
    return sorted(file for file in folder.iterdir() if not file.name.startswith(".") and file.is_file())


def _signature(path: Path) -> Signature:
    """Signature of a file or folder; of a mounted Secret, only the link `..data` to its current revision."""
    try:
        revision = path / SECRET_REVISION
        files = [revision] if revision.is_symlink() else _entries(path) if path.is_dir() else [path]
        stats = [(str(file.resolve()), file.stat()) for file in files]
    except OSError:
        return ()
    return tuple((name, stat.st_mtime_ns, stat.st_ino, stat.st_size) for name, stat in stats)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def reason_unread(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or "it can't be read" if isinstance(error, OSError) else "it is not UTF-8"
