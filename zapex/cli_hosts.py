"""The commands of a run on many hosts: replay, actor, learner, and keygen for their keys."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zapex.config import Config
from zapex.errors import ConfigError
from zapex.flags import parse, value_of
from zapex.settings import Options, Resolved, new_run_directory, resolve

if TYPE_CHECKING:
    from zapex.host_plan import Part
    from zapex.run import Place

DEFAULT_URL = "tcp://127.0.0.1:7711"


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


@dataclass(frozen=True)
class _LibraryOptions:
    """Without an environment: what to keep, and where to serve it."""

    schema: str
    """File of the schema, JSON: `zapex.Schema.to_json()` writes it. Clients: zapex.connect(URL)."""
    listen: str = DEFAULT_URL
    """Address to serve at: tcp://ADDRESS:PORT or ipc:///PATH. Any but loopback needs --keys."""
    capacity: int = 1_000_000
    """Transitions."""
    alpha: float = 0.6
    """How much priorities matter."""
    eps: float = 1e-6
    """Added to each |priority|."""
    seed: int = 0
    writers: int = 16
    """Writers that may be there at a time, over all clients; one that extends counts as one."""
    min_size_to_sample: int = 1
    """No batch before there are so many transitions."""
    samples_per_insert: float = 0.0
    """Transitions drawn for each that comes in; 0: as many as are wanted."""
    tolerance: int = 0
    """How many samples either side may be ahead; 0: chosen."""
    timeout_s: float = 5.0
    """How long a batch may wait for samples per insert."""
    keys: str = ""
    """Directory of `zapex keygen` with replay.key and public.json; clients have client.key."""
    insecure_network: bool = False
    """Do without keys, on a network where everybody may read and change everything."""


def _library(args: list[str]) -> int:
    """The replay as a library, for any client."""
    what = "Serve a replay without an environment: zapex.connect(URL, schema=FILE) is its client."
    options = parse(_LibraryOptions, _LibraryOptions(""), args, "replay", what)
    from zapex.served_library import LibraryConfig, serve_library

    try:
        schema = Path(options.schema).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--schema {options.schema} cannot be read: {error}") from None
    return serve_library(LibraryConfig(**{**vars(options), "schema": schema}))


def replay(args: list[str]) -> int:
    """The replay's host."""
    if value_of("schema", args) is not None:
        return _library(args)
    what = (
        "Keep a run's experience and serve it to actors and a learner on other hosts. --actors is "
        "how many actors all hosts may have together. With --schema FILE: the replay alone, as a "
        "library for any client, without an environment (zapex replay --schema FILE --help)."
    )
    _refuse_resume(args, "replay")
    run = resolve(args, "replay", what, _ReplayOptions)
    config = _prepared(run, "replay")
    from zapex import cluster

    place = replace(
        _place(run, "replay", run.more.listen), network_memory_bytes=run.more.network_memory << 20
    )
    return cluster.replay(config, run.spec, place)


def actor(args: list[str]) -> int:
    """An actor host."""
    what = (
        "Play on this host for the run of a replay elsewhere; may come and go at any time. "
        "--actors is how many processes this host starts."
    )
    _refuse_resume(args, "actor")
    run = resolve(args, "actor", what, _JoinOptions, holds_replay=False)
    config = _prepared(run, "actor")
    from zapex import cluster

    return cluster.actor(config, run.spec, _place(run, "actor", run.more.replay))


def learner(args: list[str]) -> int:
    """The learner's host."""
    what = (
        "Train on what the replay elsewhere samples, evaluate, and write the run's directory. "
        "Limits (--max-frames, ...) are counted here and end the whole run; Ctrl-C ends this host "
        "alone, and `zapex learner --resume RUN` goes on."
    )
    run = resolve(args, "learner", what, _JoinOptions, holds_replay=False)
    config = _prepared(run, "learner")
    from zapex import cluster

    return cluster.learner(config, run.spec, _place(run, "learner", run.more.replay))


def _refuse_resume(args: list[str], command: str) -> None:
    if value_of("resume", args):
        raise ConfigError(f"--resume is the learner's: `zapex {command}` has nothing to go on from")


def _place(run: Resolved, part: "Part", url: str) -> "Place":
    from zapex.run import Place

    return Place(part, url, run.more.keys, run.more.insecure_network)


def _prepared(run: Resolved, part: "Part") -> Config:
    """The settings with a run directory, once this machine has what its part needs."""
    config = run.config
    if config.run.inline:
        raise ConfigError(f"--inline is one process; `zapex {part}` is one of several")
    if not config.run.resume:
        config = config.replace(
            run_dir=str(new_run_directory(config, part if part != "learner" else ""))
        )
    from zapex import preflight
    from zapex.presets import explain, replay_bytes

    schema = run.spec.schema(config.replay.n_step, config.replay.gamma)
    preflight.demand(
        preflight.check(
            replay_bytes(schema, config) if part == "replay" else 1,
            processes={"replay": 2, "actor": config.actor.actors + 2, "learner": 3}[part],
            cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            huge_pages=config.replay.huge_pages and part == "replay",
        )
    )
    print(run.spec.describe, *run.spec.notes, sep="\n")
    print(explain(run.chosen), flush=True)
    return config


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
