"""The commands of a run on many hosts: replay, actor, learner, and keygen for their keys."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zapex.addresses import DEFAULT_PORT
from zapex.config import Config
from zapex.errors import ConfigError
from zapex.flags import parse, value_of
from zapex.settings import Options, Resolved, check_checkpoint, new_run_directory, resolve

if TYPE_CHECKING:
    from zapex.host_plan import Part
    from zapex.preflight import Finding
    from zapex.run import Place

PARTS: "tuple[Part, ...]" = ("replay", "actor", "learner")
DEFAULT_URL = f"tcp://127.0.0.1:{DEFAULT_PORT}"


@dataclass(frozen=True)
class _ReplayOptions:
    """Where to serve, whom to let in, and all settings."""

    settings: Options
    listen: str = DEFAULT_URL
    """Address to serve at: tcp://ADDRESS:PORT, tcp://0.0.0.0:PORT for all of this machine's, or
    ipc:///PATH. Any but loopback needs --keys."""
    keys: str = ""
    """Directory of `zapex keygen` with replay.key and public.json."""
    insecure_network: bool = False
    """Do without keys, on a network where everybody may read and change everything."""
    network_memory: int = 1024
    """MiB that messages under way may take; peers for which most is waiting are hung up on."""


@dataclass(frozen=True)
class _JoinOptions:
    """Whom to join, and all settings."""

    settings: Options
    replay: str = DEFAULT_URL
    """Where `zapex replay` listens: tcp://HOST:PORT or ipc:///PATH."""
    keys: str = ""
    """Directory of `zapex keygen` with this role's key and public.json."""
    insecure_network: bool = False
    """Do without keys, on a network where everybody may read and change everything."""


def _library(args: list[str]) -> int:
    """The replay as a library, for any client."""
    what = "Serve a replay without an environment: zapex.connect(URL, schema=FILE) is its client."
    from zapex.served_library import LibraryConfig, serve_library

    return serve_library(parse(LibraryConfig, LibraryConfig("", DEFAULT_URL), args, "replay", what))


def replay(args: list[str]) -> int:
    """The replay's host."""
    if value_of("schema", args) is not None:
        return _library(args)
    what = (
        "Keep a run's experience and serve it to actors and a learner on other hosts. --actors is "
        "how many actors all hosts may have together. With --schema FILE: the replay alone, as a "
        "library for any client, without an environment (zapex replay --schema FILE --help)."
    )
    return _part("replay", args, what)


def actor(args: list[str]) -> int:
    """An actor host."""
    what = (
        "Play on this host for the run of a replay elsewhere; may come and go at any time. "
        "--actors is how many processes this host starts."
    )
    return _part("actor", args, what)


def learner(args: list[str]) -> int:
    """The learner's host."""
    what = (
        "Train on what the replay elsewhere samples, evaluate, and write the run's directory. "
        "Limits (--max-frames, ...) are counted here and end the whole run; Ctrl-C ends this host "
        "alone, and `zapex learner --resume RUN` goes on."
    )
    return _part("learner", args, what)


def _part(part: "Part", args: list[str], what: str) -> int:
    if part != "learner" and value_of("resume", args):
        raise ConfigError(f"--resume is the learner's: `zapex {part}` has nothing to go on from")
    run = _resolved(part, args, part, what)
    place = _place(run, part)
    config = _prepared(run, place)
    from zapex import cluster

    return {"replay": cluster.replay, "actor": cluster.actor, "learner": cluster.learner}[part](
        config, run.spec, place
    )


def _resolved(part: "Part", args: list[str], command: str, what: str) -> Resolved:
    if part == "replay":
        return resolve(args, command, what, _ReplayOptions)
    return resolve(args, command, what, _JoinOptions, holds_replay=False)


def _place(run: Resolved, part: "Part") -> "Place":
    """Where this host stands, if it may and can stand there."""
    from zapex import addresses
    from zapex.hosts import security_of
    from zapex.run import Place

    more = run.more
    place = Place(part, more.listen if part == "replay" else more.replay, more.keys,
                  more.insecure_network)  # fmt: skip
    flag, check = (
        ("--listen", addresses.check_free)
        if part == "replay"
        else ("--replay", addresses.check_known)
    )
    address = addresses.parse(place.url, flag)
    security_of(place).check(place.url, flag)
    check(address)
    return (
        replace(place, network_memory_bytes=more.network_memory << 20)
        if part == "replay"
        else place
    )


def _prepared(run: Resolved, place: "Place") -> Config:
    """The settings with a run directory, once this machine has what its part needs."""
    config, part = run.config, place.part
    if config.run.inline:
        raise ConfigError(f"--inline is one process; `zapex {part}` is one of several")
    if config.run.resume:
        check_checkpoint(Path(config.run.resume), run.spec)
    else:
        config = config.replace(
            run_dir=str(new_run_directory(config, part if part != "learner" else ""))
        )
    from zapex import preflight
    from zapex.hosts import form_of
    from zapex.presets import explain
    from zapex.run import Run
    from zapex.zmq_server import check_memory

    if part == "replay":
        form = form_of(Run(config, run.spec, Path(config.run.run_dir), place=place))
        check_memory(form, place.network_memory_bytes)
    preflight.demand(_findings(run, part))
    print(run.spec.describe, *run.spec.notes, sep="\n")
    print(explain(run.chosen), flush=True)
    return config


def _findings(run: Resolved, part: "Part") -> "list[Finding]":
    """What the machine has for its part of this run and what it lacks."""
    from zapex import preflight
    from zapex.presets import replay_bytes

    config = run.config
    schema = run.spec.schema(config.replay.n_step, config.replay.gamma)
    return preflight.check(
        replay_bytes(schema, config) if part == "replay" else 1,
        processes={"replay": 2, "actor": config.actor.actors + 2, "learner": 3}[part],
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        huge_pages=config.replay.huge_pages and part == "replay",
    )


def doctor(part: "Part", args: list[str]) -> int:
    """Whether this host can be that part of a run on many hosts."""
    what = (
        f"Say whether this machine has what `zapex {part}` would need: memory, limits, the keys "
        + ("and the address to listen at." if part == "replay" else "and a replay that answers.")
    )
    run = _resolved(part, args, f"doctor {part}", what)
    from zapex import preflight

    more = run.more
    url = more.listen if part == "replay" else more.replay
    link = preflight.check_link(part, url, more.keys, more.insecure_network)
    return preflight.doctor([*_findings(run, part), *link])


@dataclass(frozen=True)
class _KeygenOptions:
    """Nothing else to choose."""


def keygen(args: list[str]) -> int:
    """New keys for every role of a run."""
    if not args or args[0].startswith("-"):
        if not {"-h", "--help"} & set(args):
            raise ConfigError("`zapex keygen` needs a new directory: zapex keygen DIR")
        args = ["DIR", *args]
    what = "Make a key for each role of a run, in a new directory that only you can read."
    parse(_KeygenOptions, _KeygenOptions(), args[1:], "keygen DIR", what)
    from zapex import curve_keys

    directory = Path(args[0])
    for path in curve_keys.make(directory):
        print(path)
    for role, command in (
        (curve_keys.SERVER, "zapex replay"),
        ("relay", "zapex actor"),
        ("learner", "zapex learner"),
        ("client", "zapex.connect (of zapex replay --schema)"),
    ):
        print(f"{command} needs {role}.key and public.json: copy no more to its host")
    return 0
