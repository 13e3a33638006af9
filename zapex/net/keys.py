"""Keys of a run's roles: made, stored so that only their owner can read them, checked on reading.

A directory of mode 0700 holds a file of mode 0600 for each role (`relay.key`: its own pair) and
`public.json` (role -> public key). The replay's host needs `replay.key` and `public.json`, an
actor's host `relay.key` and `public.json`, and so on. Copy only these files. One key is for one
role, so a key stolen from an actor's host cannot publish parameters.
"""

import json
import os
import shlex
import shutil
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

from zapex.errors import ConfigError
from zapex.net import addresses

SERVER = "replay"
CLIENTS = ("relay", "learner", "reader", "client")
_PUBLIC = "public.json"
_KEY_CHARACTERS = 40  # 32 bytes as Z85
_MOST_BYTES = 1 << 14  # of a file


@dataclass(frozen=True)
class RoleKeys:
    """One role's pair of keys, and the public keys of all roles (Z85 text)."""

    role: str
    public: str
    secret: str = field(repr=False)
    publics: dict[str, str]

    def role_of(self, public: str) -> str | None:
        """The client role that a public key stands for."""
        return next((role for role in CLIENTS if self.publics[role] == public), None)


def make(directory: Path) -> list[Path]:
    """Make new keys for every role in a new directory. Raises ConfigError if it exists.

    The directory is there with all of them or not at all, also on a full disk.
    """
    import zmq

    pairs = {role: zmq.curve_keypair() for role in (SERVER, *CLIENTS)}
    publics = {role: public.decode() for role, (public, _) in pairs.items()}
    tables: dict[str, dict[str, str]] = {
        f"{role}.key": {"role": role, "public": publics[role], "secret": secret.decode()}
        for role, (_, secret) in pairs.items()
    }
    tables[_PUBLIC] = publics
    if os.path.lexists(directory):
        raise ConfigError(f"{directory} exists: keys are never overwritten; name a new directory")
    draft = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir(mode=0o700)
        draft.chmod(0o700)  # independent of the umask
        for name, table in tables.items():
            _write(draft / name, table)
        draft.rename(directory)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise ConfigError(f"{directory} cannot be made: {error.strerror}") from None
    return [directory / name for name in tables]


def load(directory: Path, role: str) -> RoleKeys:
    """The keys that `role` needs.

    Raises ConfigError if a file is missing, damaged, another user's, or open to others.
    """
    _check_private(directory, 0o700, "directory")
    own = _read(directory / f"{role}.key", ("role", "public", "secret"))
    publics = _read(directory / _PUBLIC, (SERVER, *CLIENTS))
    if own["role"] != role or publics[role] != own["public"]:
        raise ConfigError(f"{directory}/{role}.key is not of the same set as {_PUBLIC}")
    return RoleKeys(role, own["public"], own["secret"], publics)


@dataclass(frozen=True)
class Security:
    """How far the network is trusted.

    keys: this role's keys and the others' public keys; None: no encryption, no authentication.
    insecure_network: the user allows addresses beyond this machine without keys.
    """

    keys: RoleKeys | None = None
    insecure_network: bool = False

    @classmethod
    def load(cls, keys_directory: str, role: str, insecure_network: bool) -> "Security":
        """Load a directory of `zapex keygen`; "": no keys. Raises ConfigError."""
        keys = load(Path(keys_directory), role) if keys_directory else None
        return cls(keys, insecure_network)

    def check(self, url: str, flag: str) -> None:
        """Raise ConfigError for an invalid URL, or one that is not safe without keys.

        Keys over zmtp:// and fstack:// need PyNaCl; without it this raises ConfigError, too.
        """
        if self.keys and url.startswith(("zmtp:", "fstack:")):
            from zapex.fstack.curve import check_installed

            check_installed()
        if addresses.parse(url, flag).is_loopback or self.keys or self.insecure_network:
            return
        raise ConfigError(
            f"{flag} {url} is reached from other machines, and there are no keys: make them "
            "with `zapex keygen DIR` and give --keys DIR; or give --insecure-network: then "
            "every machine that reaches this address can read and change everything"
        )


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
            f"belongs to user {status.st_uid}: chmod {mode:o} {shlex.quote(str(path))}"
        )


def _is_key(text: str) -> bool:
    """Whether libzmq accepts it as a key."""
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
            raise ConfigError(f"{path} is damaged: {name!r} is not a key")
    return {name: table[name] for name in names}
