"""Keys of a run's roles: made, stored where only their owner can read them, checked when read.

A directory of mode 0700 holds a file of mode 0600 for each role (`relay.key`: its own pair) and
`public.json` (role -> public key). The replay's host needs `replay.key` and `public.json`, an
actor's host `relay.key` and `public.json`, and so on: copy no more than that. One key stands for
one role, so what is stolen from an actor's host cannot publish parameters.
"""

import json
import os
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

from zapex.errors import ConfigError

SERVER = "replay"
CLIENTS = ("relay", "learner", "reader", "client")
KEY_OF = {"replay": SERVER, "actor": "relay", "learner": "learner"}
"""Part of a run -> whose key its host has."""
_PUBLIC = "public.json"
_KEY_CHARACTERS = 40  # 32 bytes as Z85
_MOST_BYTES = 1 << 14  # of a file


@dataclass(frozen=True)
class RoleKeys:
    """One role's own pair, and everybody's public keys by role (Z85 text)."""

    role: str
    public: str
    secret: str = field(repr=False)
    publics: dict[str, str]

    def role_of(self, public: str) -> str | None:
        """The client role that a public key stands for."""
        for role in CLIENTS:
            if self.publics[role] == public:
                return role
        return None


def make(directory: Path) -> list[Path]:
    """New keys for every role in a new directory. Raises ConfigError if it exists."""
    import zmq

    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise ConfigError(
            f"{directory} exists: keys are never overwritten; name a new directory"
        ) from None
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error.strerror}") from None
    directory.chmod(0o700)  # whatever the umask says
    publics, made = {}, []
    for role in (SERVER, *CLIENTS):
        public, secret = (key.decode() for key in zmq.curve_keypair())
        publics[role] = public
        made.append(directory / f"{role}.key")
        _write(made[-1], {"role": role, "public": public, "secret": secret})
    made.append(directory / _PUBLIC)
    _write(made[-1], publics)
    return made


def load(directory: Path, role: str) -> RoleKeys:
    """The keys that `role` needs.

    Raises ConfigError where a file is missing, damaged, another user's, or open to others.
    """
    _check_private(directory, 0o700, "directory")
    own = _read(directory / f"{role}.key", ("role", "public", "secret"))
    publics = _read(directory / _PUBLIC, (SERVER, *CLIENTS))
    if own["role"] != role or publics[role] != own["public"]:
        raise ConfigError(f"{directory}/{role}.key is not of the same set as {_PUBLIC}")
    return RoleKeys(role, own["public"], own["secret"], publics)


def _write(path: Path, table: dict[str, str]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        os.fchmod(fd, 0o600)
        json.dump(table, file, indent=2)
        file.write("\n")


def _check_private(path: Path, mode: int, what: str) -> None:
    try:
        status = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; `zapex keygen` makes keys"
        ) from None
    is_kind = stat.S_ISDIR(status.st_mode) if what == "directory" else stat.S_ISREG(status.st_mode)
    found = stat.S_IMODE(status.st_mode)
    if not is_kind or status.st_uid != os.getuid() or found & ~mode:
        raise ConfigError(
            f"{path} must be a {what} of your own with mode {mode:04o}, it has {found:04o} and "
            f"belongs to user {status.st_uid}: chmod {mode:o} {path}"
        )


def _is_key(text: str) -> bool:
    """libzmq will take it."""
    from zmq.utils import z85

    try:
        return len(text) == _KEY_CHARACTERS and len(z85.decode(text)) == 32
    except (KeyError, ValueError, struct.error):
        return False


def _read(path: Path, names: tuple[str, ...]) -> dict[str, str]:
    _check_private(path, 0o600, "file")
    try:
        with path.open("rb") as file:
            table = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    if not isinstance(table, dict) or any(not isinstance(table.get(name), str) for name in names):
        raise ConfigError(f"{path} is damaged: it lacks one of {', '.join(names)}")
    for name in names:
        if name != "role" and not _is_key(table[name]):
            raise ConfigError(f"{path} is damaged: {name!r} is no key")
    return {name: table[name] for name in names}
