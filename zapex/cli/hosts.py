"""The commands of a run on many hosts: replay, actor, learner, and keygen for their keys."""

import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zapex.cli.flags import parse
from zapex.cli.resolve import Options, Resolved, findings, prepared, resolve
from zapex.errors import ConfigError
from zapex.host.parts import PARTS, Part
from zapex.net.addresses import DEFAULT_PORT

if TYPE_CHECKING:
    from zapex.run.run import Membership

DEFAULT_URL = f"tcp://127.0.0.1:{DEFAULT_PORT}"


@dataclass(frozen=True)
class _HostOptions(Options):
    """This host's part."""

    keys: str = ""
    """Directory of `zapex keygen` with this role's key and public.json."""
    insecure_network: bool = False
    """Use no keys: every machine on the network can then read and change everything."""


def _variable(name: str) -> str:
    return os.environ.get(f"ZAPEX_FSTACK_{name}", "")


_FSTACK_LIB, _FSTACK_CONF, _FSTACK_EAL = (partial(_variable, n) for n in ("LIB", "CONF", "EAL"))


@dataclass(frozen=True)
class _ReplayOptions(_HostOptions):
    """What the replay's host takes besides the settings."""

    listen: str = DEFAULT_URL
    """Address to serve at: tcp://ADDRESS:PORT, tcp://0.0.0.0:PORT for all of this machine's, or
    ipc:///PATH. Any but loopback needs --keys. zmtp://ADDRESS:PORT serves the same clients without
    libzmq; they connect with tcp://. So does fstack://ADDRESS:PORT, on F-Stack (docs/fstack.md)."""
    with_learner: bool = False
    """Train on this host, too: replay and learner share memory, and only actors are elsewhere."""
    shards: int = 1
    """How many replays the run has; each is a `zapex replay` with its own --shard, and the other
    commands name all of them (docs/many_hosts.md)."""
    shard: int = 0
    """Which of them this is, from 0; shard 0 gives out actor numbers and keeps the parameters."""
    network_memory: int = 1024
    """MiB for messages in flight; beyond it the peers that hold most are disconnected."""
    fstack_lib: str = field(default_factory=_FSTACK_LIB)
    """F-Stack's shared library, for fstack://; or the variable ZAPEX_FSTACK_LIB."""
    fstack_conf: str = field(default_factory=_FSTACK_CONF)
    """F-Stack's configuration, for fstack://; or ZAPEX_FSTACK_CONF."""
    fstack_eal: str = field(default_factory=_FSTACK_EAL)
    """More arguments for its DPDK, --fstack-eal="--no-pci --vdev=..."; or ZAPEX_FSTACK_EAL."""


@dataclass(frozen=True)
class _JoinOptions(_HostOptions):
    """What the other hosts take besides the settings."""

    replay: str = DEFAULT_URL
    """Where `zapex replay` listens: tcp://HOST:PORT or ipc:///PATH; of a run with shards all of
    them, shard 0 first, with commas and the same for all commands."""
    compress: bool = False
    """Compress this host's experience, or its batches, with zstd: for a narrow link."""


@dataclass(frozen=True)
class _LearnerOptions(_JoinOptions):
    """What the learner's host takes besides the settings."""

    take_over: bool = False
    """Replace another run's learner that trains with this replay; that one ends."""


_FIRST = ("keys", "insecure_network", "env", "config", "preset", "run_dir")
_FIRST_OF = {
    "replay": (
        "listen", "with_learner", "shards", "shard", "network_memory", "actors", "capacity",
        "samples_per_insert",
    ),
    "actor": ("replay", "actors", "envs_per_actor", "env_threads", "actor_threads", "plain"),
    "learner": (
        "replay", "take_over", "resume", "max_minutes", "max_frames", "stop_at_return", "device",
    ),
}  # fmt: skip
"""The flags that the help of each command shows, besides those of all."""
WHAT = {
    "replay": (
        "Keep a run's experience and serve it to actors and a learner on other hosts. --actors is "
        "how many actors all hosts may have together. With --schema FILE: the replay alone, as a "
        "library for any client, without an environment (zapex replay --schema FILE --help)."
    ),
    "actor": (
        "Run actors on this host for a replay on another host; a host may join and leave at any "
        "time. --actors is how many processes this host starts."
    ),
    "learner": (
        "Train on samples of a replay on another host, evaluate, and write the run's directory. "
        "Limits (--max-frames, ...) are counted here and end the whole run; Ctrl-C ends only this "
        "host, and `zapex learner --resume RUN` continues."
    ),
}
"""The part of a run on many hosts that each command is -> its help."""


def command(name: str, args: list[str], wrap: str = "") -> int:
    """`zapex replay`, `zapex actor`, `zapex learner`. wrap: as in zapex.run.run.Run."""
    part = PARTS[name]
    if part.listens and any(word.partition("=")[0] == "--schema" for word in args):
        what = (
            "Serve a replay without an environment: its client is zapex.connect(URL, schema=FILE)."
        )
        from zapex.library.url_service import LibraryConfig, serve_library

        default = LibraryConfig(
            "", DEFAULT_URL, fstack_lib=_FSTACK_LIB(), fstack_conf=_FSTACK_CONF(),
            fstack_eal=_FSTACK_EAL(),
        )  # fmt: skip
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
    from zapex.run.parts import run_part

    return run_part(config, run.spec, membership, wrap)


def _chosen(part: Part, args: list[str]) -> Part:
    """The part with a learner, if it is asked for."""
    asked = part.listens and {"--with-learner", "--with-learner=true"} & set(args)
    return PARTS["replay with learner"] if asked else part


def _resolved(part: Part, args: list[str], command: str, what: str) -> Resolved:
    name = part.words[0]
    options = {"replay": _ReplayOptions, "learner": _LearnerOptions}.get(name, _JoinOptions)
    return resolve(args, command, what, options, (*_FIRST_OF[name], *_FIRST), part)


def _membership(run: Resolved, part: Part) -> "Membership":
    """How this host takes part, checked."""
    from zapex.net import addresses
    from zapex.net.addresses import check_free
    from zapex.run.networked import security_of
    from zapex.run.run import Membership
    from zapex.wire.compression import check_installed

    more, flag = run.more, f"--{part.address}"
    url = getattr(more, part.address)
    # A run that is resumed is the one whose learner was there; its directory has a lock.
    take_over = getattr(more, "take_over", False) or bool(run.config.run.resume)
    membership = Membership(
        part.name, url, keys=more.keys, insecure_network=more.insecure_network,
        compress=getattr(more, "compress", False),
        take_over=take_over and part.learns and not part.listens,
    )  # fmt: skip
    if membership.compress:
        check_installed("--compress")
    urls = [url] if part.listens else _urls(url)
    for one in urls:
        address = addresses.parse(one, flag)
        security_of(membership).check(one, flag)
        if not part.listens:
            addresses.check_known(address)
    if not part.listens:
        check_shards(len(urls), 0, part)
        several = tuple(urls) if len(urls) > 1 else ()
        return replace(membership, url=urls[0], urls=several, shards=len(urls))
    check_shards(more.shards, more.shard, part)
    membership = replace(membership, shard=more.shard, shards=more.shards)
    membership = replace(
        membership, network_memory_bytes=more.network_memory << 20, fstack_lib=more.fstack_lib,
        fstack_conf=more.fstack_conf, fstack_eal=more.fstack_eal,
    )  # fmt: skip
    check_free(url, membership.fstack)
    return membership


def _urls(text: str) -> list[str]:
    """The addresses in --replay, of all shards. Raises ConfigError."""
    urls = [url.strip() for url in text.split(",")]
    twice = next((url for url in urls if urls.count(url) > 1), None)
    if twice is not None:
        raise ConfigError(f"--replay names each shard once, got {twice!r} twice")
    return urls


def check_shards(shards: int, shard: int, part: Part) -> None:
    """Raise ConfigError for shards that this part of a run cannot have."""
    from zapex.replay.shards import MOST_SHARDS

    if not 1 <= shards <= MOST_SHARDS:
        raise ConfigError(f"a run has 1 to {MOST_SHARDS} shards, got {shards}")
    if not 0 <= shard < shards:
        raise ConfigError(
            f"--shard must be 0 to {shards - 1} of --shards {shards}, got {shard}"
            + (": give --shards, too" if shards == 1 else "")
        )
    if shards > 1 and part.listens and part.learns:
        raise ConfigError(
            "--with-learner is for one replay: with --shards the learner is a command of its own, "
            "`zapex learner`, which may run on this host"
        )


def doctor(name: str, args: list[str]) -> int:
    """Check whether this host can run that part of a run on many hosts."""
    part = _chosen(PARTS[name], args)
    what = (
        f"Say whether this machine has what `zapex {name}` would need: memory, limits, the keys "
        + ("and the address to listen at." if part.listens else "and a replay that answers.")
    )
    run = _resolved(part, args, f"doctor {name}", what)
    from zapex.run import preflight

    more = run.more
    fstack = None
    if part.listens:
        from zapex.fstack import Setup

        fstack = Setup(more.fstack_lib, more.fstack_conf, more.fstack_eal)
    url = getattr(more, part.address)
    links = [
        finding
        for one in ([url] if part.listens else _urls(url))
        for finding in preflight.check_link(
            part.name, one, more.keys, more.insecure_network, fstack=fstack
        )
    ]
    return preflight.doctor([*findings(run, part), *links])


@dataclass(frozen=True)
class _KeygenOptions:
    """Where the keys are written."""

    dir: str = ""
    """A new directory."""


def keygen(args: list[str]) -> int:
    """Make new keys for every role of a run."""
    what = "Make a key for each role of a run, in a new directory that only you can read."
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
        print(f"{command} needs {role}.key and public.json: copy no more to its host")
    return 0
