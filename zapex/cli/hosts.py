"""`zapex replay`, `actor`, `learner` and `keygen`: a run on many hosts."""

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zapex.cli.flags import parse
from zapex.cli.resolve import Options, Resolved, findings, prepared, resolve
from zapex.config.fields import SettingsGroup, setting
from zapex.errors import ConfigError
from zapex.host.parts import PARTS, Part
from zapex.net.addresses import DEFAULT_PORT

if TYPE_CHECKING:
    from zapex.run.run import Membership

_MOST_SHARDS = 128  # as in zapex.replay.shards, which imports NumPy
DEFAULT_URL = f"tcp://127.0.0.1:{DEFAULT_PORT}"


@dataclass(frozen=True)
class _HostOptions(Options):
    """Connection."""

    keys: str = ""
    """Directory with this role's key and public.json, made by `zapex keygen`."""
    insecure_network: bool = False
    """Use no keys: every machine on the network can then read and change everything."""


_FSTACK = ("fstack_lib", "fstack_conf", "fstack_eal")


def _variable(name: str) -> str:
    return os.environ.get(f"ZAPEX_{name.upper()}", "")


@dataclass(frozen=True)
class _ReplayOptions(_HostOptions):
    """Connection."""

    listen: str = DEFAULT_URL
    """Address to listen at: tcp://ADDRESS:PORT, tcp://0.0.0.0:PORT for all interfaces, or
    ipc:///PATH. All but loopback need --keys. zmtp://ADDRESS:PORT and, on F-Stack,
    fstack://ADDRESS:PORT serve the same clients without libzmq; they connect with tcp://."""
    with_learner: bool = False
    """Also train on this host: replay and learner share memory, and only actors are elsewhere."""
    shards: int = setting(1, low=1, high=_MOST_SHARDS)
    """Number of replays in the run, each a `zapex replay` with its own --shard; the other commands
    name all of them."""
    shard: int = setting(0, low=0)
    """Number of this replay, from 0; shard 0 assigns actor numbers and keeps the parameters."""
    network_memory: int = setting(1024, low=1)
    """MiB for messages in flight; beyond this, the peers that hold most are disconnected."""
    fstack_lib: str = field(default_factory=partial(_variable, "fstack_lib"))
    """With fstack://: F-Stack's shared library; or set ZAPEX_FSTACK_LIB."""
    fstack_conf: str = field(default_factory=partial(_variable, "fstack_conf"))
    """With fstack://: F-Stack's configuration; or set ZAPEX_FSTACK_CONF."""
    fstack_eal: str = field(default_factory=partial(_variable, "fstack_eal"))
    """With fstack://: arguments for DPDK, e.g. --fstack-eal="--no-pci --vdev=..."; or set
    ZAPEX_FSTACK_EAL."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard >= self.shards:
            raise ConfigError(
                f"--shard must be 0 to {self.shards - 1} of --shards {self.shards}, got "
                f"{self.shard}" + (": give --shards, too" if self.shards == 1 else "")
            )
        if self.shards > 1 and self.with_learner:
            raise ConfigError(
                "--with-learner is for one replay: with --shards, start `zapex learner` "
                "separately, on this host or another"
            )

    @property
    def urls(self) -> tuple[str, ...]:
        """Where it listens."""
        return (self.listen,)


@dataclass(frozen=True)
class _JoinOptions(_HostOptions):
    """Connection."""

    replay: str = DEFAULT_URL
    """Address where `zapex replay` listens: tcp://HOST:PORT or ipc:///PATH; with shards, all
    addresses with commas, shard 0 first, the same for all commands."""
    compress: bool = False
    """Compress this host's experience, or its batches, with zstd, for a slow link."""

    def __post_init__(self) -> None:
        super().__post_init__()
        twice = [url for url in self.urls if self.urls.count(url) > 1]
        if twice:
            raise ConfigError(f"--replay names each shard once, got {twice[0]!r} twice")
        if len(self.urls) > _MOST_SHARDS:
            raise ConfigError(f"--replay names at most {_MOST_SHARDS} shards, got {len(self.urls)}")

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of all shards."""
        return tuple(url.strip() for url in self.replay.split(","))


@dataclass(frozen=True)
class _LearnerOptions(_JoinOptions):
    """Connection."""

    take_over: bool = False
    """Replace another learner that trains with this replay; that one ends."""


WHAT = {
    "replay": (
        "Keep a run's experience and serve it to actors and a learner on other hosts. --actors is "
        "the most actors on all hosts together. With --schema FILE: serve the replay alone to any "
        "client, without an environment (see `zapex replay --schema FILE --help`)."
    ),
    "actor": (
        "Run actors on this host for a replay on another host. Hosts may join and leave at any "
        "time. --actors is the number of processes on this host."
    ),
    "learner": (
        "Train on samples of a replay on another host, evaluate, and write the run directory. "
        "Limits (--max-frames, ...) are counted here and end the whole run. Ctrl-C ends only this "
        "host; `zapex learner --resume RUN` continues."
    ),
}
"""Command -> its help."""


def command(name: str, args: list[str], wrap: str = "") -> int:
    """`zapex replay`, `zapex actor`, `zapex learner`. wrap: as in zapex.run.run.Run."""
    part = PARTS[name]
    if part.listens and any(word.partition("=")[0] == "--schema" for word in args):
        what = "Serve a replay without an environment; clients use zapex.connect(URL, schema=FILE)."
        from zapex.library.url_server import LibraryConfig, serve_library

        fstack: dict[str, Any] = {name: _variable(name) for name in _FSTACK}
        default = LibraryConfig("", DEFAULT_URL, **fstack)
        return serve_library(parse(default, args, name, what))
    part = _chosen(part, args)
    run = _resolved(part, args, name, WHAT[name])
    membership = _membership(run, part)
    if run.config.run.inline:
        raise ConfigError(f"--inline is one process; `zapex {name}` is one of several")
    if part.listens:
        from zapex.net.server import check_memory
        from zapex.run.run import Run

        form = Run(run.config, run.spec, Path(), membership=membership).form
        check_memory(form, membership.network_memory_bytes)
    config = prepared(run, part)
    from zapex.run.networked import run_part

    return run_part(config, run.spec, membership, wrap)


def _chosen(part: Part, args: list[str]) -> Part:
    """The part with a learner, if it is asked for."""
    asked = part.listens and {"--with-learner", "--with-learner=true"} & set(args)
    return PARTS["replay with learner"] if asked else part


def _resolved(part: Part, args: list[str], command: str, what: str) -> Resolved:
    name = part.command[0]
    options = {"replay": _ReplayOptions, "learner": _LearnerOptions}.get(name, _JoinOptions)
    return resolve(args, command, what, options, part)


def _membership(run: Resolved, part: Part) -> "Membership":
    """How this host takes part in the run, checked. Raises ConfigError."""
    from zapex.net import addresses
    from zapex.run.networked import security_of
    from zapex.run.run import Membership
    from zapex.wire.compression import check_installed

    more, flag, urls = run.more, f"--{part.address}", run.more.urls
    own: dict[str, Any]
    if part.listens:
        own = {name: getattr(more, name) for name in ("shard", "shards", *_FSTACK)}
        own["network_memory_bytes"] = more.network_memory << 20
    else:
        # A resumed run takes its own learner's place; its directory has a lock.
        take_over = part.learns and (more.take_over or bool(run.config.run.resume))
        own = {"shards": len(urls), "compress": more.compress, "take_over": take_over}
        own["urls"] = urls if len(urls) > 1 else ()
    membership = Membership(
        part.name, urls[0], keys=more.keys, insecure_network=more.insecure_network, **own
    )
    if membership.compress:
        check_installed("--compress")
    for url in urls:
        address = addresses.parse(url, flag)
        security_of(membership).check(url, flag)
        if not part.listens:
            addresses.check_known(address)
    if part.listens:
        addresses.check_free(urls[0], membership.fstack)
    return membership


def doctor(name: str, args: list[str]) -> int:
    """`zapex doctor replay|actor|learner`: check one host of several."""
    part = _chosen(PARTS[name], args)
    what = (
        f"Check whether this machine has what `zapex {name}` needs: memory, limits, keys and "
        + ("an address to listen at." if part.listens else "a replay that answers.")
    )
    run = _resolved(part, args, f"doctor {name}", what)
    from zapex.run import preflight

    more, fstack = run.more, None
    if part.listens:
        from zapex.fstack import Setup

        fstack = Setup(*(getattr(more, name) for name in _FSTACK))
    links = [
        finding
        for url in more.urls
        for finding in preflight.check_link(
            part.name, url, more.keys, more.insecure_network, fstack=fstack
        )
    ]
    return preflight.doctor([*findings(run, part), *links])


@dataclass(frozen=True)
class _KeygenOptions(SettingsGroup):
    """Options."""

    dir: str = ""
    """A new directory for the keys."""


def keygen(args: list[str]) -> int:
    """`zapex keygen DIR`: new keys for each role of a run."""
    what = "Create a key for each role of a run, in a new directory that only you can read."
    options = parse(_KeygenOptions(), args, "keygen", what, "dir")
    from zapex.net import keys as curve_keys

    for path in curve_keys.make(Path(options.dir)):
        print(path)
    for role, command in (
        (curve_keys.SERVER, "zapex replay"),
        ("relay", "zapex actor"),
        ("learner", "zapex learner"),
        ("client", "zapex.connect (of zapex replay --schema)"),
    ):
        print(f"{command} needs {role}.key and public.json: copy only these to its host")
    return 0
