"""`zapex simulate`: its flags, its files and its lines."""

import json
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from zapex.cli.flags import check_outputs
from zapex.cli.resolve import Options, Resolved, cache_directory, resolve
from zapex.errors import ConfigError

FIRST = (
    "config", "actor_steps", "learner_ms", "per_host", "shards", "host_gbit", "site_gbit",
    "replay_gbit", "learner_gbit", "actor_rtt_ms", "learner_rtt_ms", "want_steps", "want_batches",
    "most_actors", "times", "measure", "json", "figure", "prefetch", "samples_per_insert",
)  # fmt: skip
"""The flags that `zapex simulate --help` shows."""
_POSITIVE = ("actor_steps", "learner_ms", "host_gbit", "site_gbit", "replay_gbit", "learner_gbit",
             "actor_rtt_ms", "learner_rtt_ms", "want_batches")  # fmt: skip


@dataclass(frozen=True)
class SimulateOptions(Options):
    """The cluster, and what is wanted of it."""

    actor_steps: float = 0.0
    """Steps a second of one actor, all its environments together; 0: as `zapex balance` found."""
    learner_ms: float = 0.0
    """Milliseconds of a learner's step; 0: as `zapex balance` found."""
    per_host: int = 0
    """Actors of one host; 0: --actors."""
    shards: int = 1
    """Replay hosts; actor hosts are spread over them by a hash."""
    host_gbit: float = 10.0
    """Rate of each actor host's link; 0: no limit."""
    site_gbit: float = 0.0
    """Rate of one link that all actor hosts share; 0: there is none."""
    replay_gbit: float = 10.0
    """Rate of each replay host's link; 0: no limit."""
    learner_gbit: float = 10.0
    """Rate of the learner's link; 0: no limit."""
    actor_rtt_ms: float = 0.2
    """Round trip between actor hosts and replay."""
    learner_rtt_ms: float = 0.2
    """Round trip between learner and replay."""
    want_steps: int = 0
    """Say what to buy for so many steps a second; 0: any."""
    want_batches: float = 0.0
    """Say what to buy for so many batches a second; 0: any."""
    most_actors: int = 10_000
    """Simulate 1 to so many actors."""
    times: str = ""
    """Times of each piece of work from this file, which --json wrote on the machine in question."""
    measure: bool = False
    """Measure those times again, though a result of this machine is kept."""
    json: str = ""
    """Write the result to this file."""
    figure: str = ""
    """Draw the result in this file, which ends in .png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _POSITIVE:
            if not 0 <= getattr(self, name) <= 1e9:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be 0 or more, got {getattr(self, name):g}")
        for name, low, high in (
            ("per_host", 0, 4096), ("shards", 1, 64), ("want_steps", 0, 10**12),
            ("most_actors", 1, 100_000),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be {low} to {high:,}, got {getattr(self, name):,}")
        if self.times and self.measure:
            raise ConfigError("--times brings the times, --measure measures them: give one of both")
        check_outputs(self.json, self.figure)


def command(args: list[str]) -> int:
    """Find the times, simulate, print, write, draw."""
    what = (
        "Simulate a run on many hosts, for 1 to 10,000 actors: how fast it is, how old batches and "
        "parameters are, and what limits it. `zapex simulate run.toml` takes the run's settings."
    )
    if args and not args[0].startswith("-") and _is_file(args[0]):
        args = ["--config", *args]
    run = resolve(args, "simulate", what, SimulateOptions, FIRST)
    options: SimulateOptions = run.more
    try:
        import simpy  # noqa: F401
    except ImportError:
        raise ConfigError("the simulation needs simpy: pip install simpy") from None
    from zapex.run.run import Run
    from zapex.studies import forecast, forecast_figure, purchase
    from zapex.studies.cluster import Link

    times, sizes, source = _times(run, options)
    speeds, whence = _speeds(run, options)
    links = forecast.Links(
        Link(options.host_gbit),
        Link(options.site_gbit, options.actor_rtt_ms),
        Link(options.replay_gbit),
        Link(options.learner_gbit, options.learner_rtt_ms),
    )
    plan = Run(run.config, run.spec, Path()).plan
    cluster = forecast.cluster_of(
        run.config, run.spec, speeds, times, sizes, links, shards=options.shards,
        per_host=options.per_host or run.config.actor.actors, parameter_bytes=plan.parameter_bytes,
    )  # fmt: skip
    print(f"{run.spec.describe}\ntimes of each piece of work: {source}\n{whence}\n", flush=True)
    found = forecast.sweep(cluster, options.most_actors)
    print(*forecast.lines(cluster, found), sep="\n")
    about: dict[str, Any] = {"time": _now(), "env": run.config.env.env, "times_from": source}
    report = forecast.report_of(cluster, found, about)
    if options.want_steps or options.want_batches:
        bought = purchase.advise(cluster, options.want_steps, options.want_batches)
        print("", *bought.lines(cluster), sep="\n")
        wanted = {"steps_per_s": options.want_steps, "batches_per_s": options.want_batches}
        report["purchase"] = {"wanted": wanted, "said": bought.lines(cluster)}
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    if options.figure:
        title = f"{run.config.env.env}, {cluster.per_host} actors a host, {options.shards} shard(s)"
        forecast_figure.draw(cluster, found, f"{title}: simulated", Path(options.figure))
    return 0


def _is_file(word: str) -> bool:
    """Whether a word is a settings file, perhaps a misspelt one; Gymnasium's ids have no dot."""
    return Path(word).is_file() or ("." in word and ":" not in word)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _times(run: Resolved, options: SimulateOptions) -> tuple[Any, Any, str]:
    """Times, sizes, and where they come from; measured ones are kept."""
    from zapex.machine.disk import replace_whole
    from zapex.run.run import Run
    from zapex.studies import advice, calibration

    if options.times:
        return *_read(Path(options.times), "--times"), options.times
    name = advice.kept_at(cache_directory(), run.config, run.spec, run.machine).name
    chunk = f"-{run.config.chunk_transitions}-{run.config.replay.n_step}.json"
    path = cache_directory() / "zapex" / "simulate" / name.replace(".json", chunk)
    if path.exists() and not options.measure:
        try:
            return *_read(path, "the kept result"), f"measured here before ({path})"
        except ConfigError as error:
            print(error)
    print("measuring each piece of work here, about 15 s", flush=True)
    times, sizes = calibration.measure(Run(run.config, run.spec, Path()))
    text = json.dumps({"time": _now(), "times": vars(times), "sizes": sizes._asdict()}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, [f"{text}\n".encode()])
    except OSError as error:
        return times, sizes, f"measured here now; not kept: {error}"
    return times, sizes, f"measured here now; kept in {path}"


def _read(path: Path, what: str) -> tuple[Any, Any]:
    from zapex.studies.calibration import Sizes
    from zapex.studies.cluster import Times

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        sizes = Sizes(**{name: int(found["sizes"][name]) for name in Sizes._fields})
        times = Times.of(found["times"])
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise ConfigError(
            f"{what} {path} is no result of `zapex simulate --json`: {error}"
        ) from None
    if min(sizes) < 1:
        raise ConfigError(f"{what} {path}: sizes must be at least 1 byte")
    return times, sizes


def _speeds(run: Resolved, options: SimulateOptions) -> tuple[Any, str]:
    """Of an actor and the learner, and where they come from."""
    from zapex.machine import gpu
    from zapex.studies import advice
    from zapex.studies.balance import QUICK, Balance
    from zapex.studies.forecast import Speeds
    from zapex.studies.saturation import Model

    config, machine = run.config, run.machine
    steps, learn_s = options.actor_steps, options.learner_ms / 1e3
    said = "as given"
    if not (steps and learn_s):
        report = advice.kept(advice.kept_at(cache_directory(), config, run.spec, machine))
        if report is None:
            print("measuring actor and learner briefly; `zapex balance` does it well", flush=True)
            if machine.gpus and machine.gpu is None:
                machine = replace(machine, gpu=gpu.look())
            report = Balance(
                config, run.spec, machine, QUICK, step_s=learn_s,
                say=lambda line: print(line, flush=True),
            ).run()  # fmt: skip
        model = Model(**report["models"].get(config.actor.inference, report["models"]["cpu"]))
        steps = steps or model.actor(config.actor.envs_per_actor)
        rates = report["learner"]["batches_per_s_by_threads"].values()
        learn_s = learn_s or 1 / max(rates)
        said = "as this machine is"
    return Speeds(steps, learn_s), (
        f"an actor plays {steps:,.0f} steps/s, a learner's step takes {1e3 * learn_s:.3g} ms: "
        f"{said}"
    )
