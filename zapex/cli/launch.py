"""`zapex launch`, `status`, `logs` and `stop`: a run whose hosts a scheduler places."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zapex.cli import runs
from zapex.cli.flags import parse, read_settings
from zapex.cli.resolve import check_trust, state_directory
from zapex.clusters.host import FACTS
from zapex.config.clusters import TABLES
from zapex.config.fields import SettingsGroup, setting
from zapex.config.words import did_you_mean
from zapex.errors import ConfigError
from zapex.machine.reading import read_text, read_toml, say

if TYPE_CHECKING:
    from zapex.clusters.placement import Launched

_STALE_S = 60.0  # a run's parent writes its snapshot every five seconds


@dataclass(frozen=True)
class _LaunchOptions(SettingsGroup):
    """Options."""

    file: str = ""
    """TOML file with the settings and the table of the scheduler: [slurm], [kubernetes] or
    [ray]."""
    on: str = ""
    """The scheduler: slurm, kubernetes or ray; default: the one whose table the file has."""
    name: str = ""
    """Name of the run at the scheduler; default: from the time."""
    dir: str = ""
    """A new directory for keys and output; on SLURM and Ray all hosts must see it; default:
    runs/NAME."""
    dry_run: bool = False
    """Check the run and print what would be submitted; submit nothing."""
    trust: bool = False
    """Allow the modules that the file names, and the Ray cluster."""
    attach: bool = False
    """Watch a run on Ray again, and give its hosts their keys; FILE is its directory or name."""


def launch(args: list[str]) -> int:
    """`zapex launch FILE`: submit a run, wait for its hosts, and report what is missing."""
    what = (
        "Launch a run on SLURM, Kubernetes or Ray. Waits up to 30 seconds for its hosts; "
        "`zapex status NAME` shows them later."
    )
    options = parse(_LaunchOptions(), args, "launch", what, "file")
    if options.attach:
        return _find(options.file, options.trust).watch()
    check_trust(options.file, read_settings(options.file), {}, options.trust)
    from zapex.clusters import placement as clusters

    on = options.on or _only_table(options.file)
    run = clusters.place(options.file, on, options.name, options.dir)
    for note in clusters.notes(run):
        print(f"note: {note}", file=sys.stderr)
    if options.dry_run:
        print(run.text(), end="")
        return 0
    name, directory = run.placement.name, run.directory
    run = clusters.launch(options.file, on, name=name, directory=directory)
    _launches().mkdir(parents=True, exist_ok=True)
    (_launches() / name).write_text(str(directory), encoding="utf-8")
    print(f"{name} is submitted; its directory is {directory}", flush=True)
    hosts = run.wait_for_start(lambda line: print(line, flush=True))
    if any(host.state == "pending" for host in hosts):
        print("it starts when there is room")
    print(f"zapex status {name}    zapex logs learner {name}    zapex stop {name}")
    return run.watch()


def _only_table(path: str) -> str:
    tables = read_toml(Path(path))
    found = [on for on in TABLES if on in tables]
    if len(found) == 1:
        return found[0]
    have = ", ".join(f"[{on}]" for on in found) or "none of them"
    raise ConfigError(
        f"{path} must have one of [slurm], [kubernetes], [ray], or give --on; it has {have}"
    )


@dataclass(frozen=True)
class _RunOptions(SettingsGroup):
    """Options."""

    run: str = ""
    """Name or directory of the run; default: the last one launched from here. `zapex stop` first
    takes one that is running here."""
    trust: bool = False
    """Allow the Ray cluster that the directory names; it can run code in this process."""


@dataclass(frozen=True)
class _StatusOptions(_RunOptions):
    """Options."""

    probe: str = ""
    """Check one host instead, by its run directory: exit code 1 if it does not work (for a
    scheduler's probes)."""
    replay: str = ""
    """With --probe: an address at which a replay must answer."""


def status(args: list[str]) -> int:
    """`zapex status [RUN]`: the scheduler's state of each host."""
    what = "Show the hosts of a launched run, and why those that wait are waiting."
    options = parse(_StatusOptions(), args, "status", what, "[run]")
    if options.probe:
        return _probe(Path(options.probe), options.replay)
    run = _find(options.run, options.trust)
    say(f"{run.placement.name} on {run.placement.on}, {run.directory}")
    _print_states(run)
    return 0


def _print_states(run: "Launched") -> None:
    from zapex.clusters.placement import summary

    say("\n".join(summary(run.states())))


def _probe(run_dir: Path, url: str) -> int:
    """Check one role on this host: that its socket answers, and that its parent still writes."""
    from zapex.net import addresses
    from zapex.watch.recorders import SNAPSHOT_FILE

    if url:
        try:
            addresses.mechanism(addresses.parse(url, "--replay"), 5.0)
        except ConnectionError as error:
            print(f"{url}: {error}")
            return 1
    try:
        age_s = time.time() - (run_dir / SNAPSHOT_FILE).stat().st_mtime
    except OSError:
        print(f"{run_dir} has not started to work")
        return 0  # it may be waiting for another host, which is no reason to kill it
    print(f"{run_dir} worked {age_s:.0f} s ago")
    return int(age_s > _STALE_S)


@dataclass(frozen=True)
class _LogsOptions(_RunOptions):
    """Options."""

    role: str = ""
    """replay, learner or actor."""
    lines: int = setting(50, low=1)
    """Lines to print from each host."""


def logs(args: list[str]) -> int:
    """`zapex logs ROLE [RUN]`: the last lines that the hosts of one role printed."""
    what = "Print the last lines of each host of a role."
    options = parse(_LogsOptions(), args, "logs", what, "role [run]")
    say(_find(options.run, options.trust).log(options.role, options.lines))
    return 0


def stop(args: list[str]) -> int:
    """`zapex stop [RUN]`: the learner saves, then every host ends."""
    what = "Stop a run. The learner saves a checkpoint first."
    options = parse(_RunOptions(), args, "stop", what, "[run]")
    local = runs.local(options.run)
    if local is not None:
        return runs.stop(local)
    run = _find(options.run, options.trust)
    print(f"stopping {run.placement.name}; the learner saves first", flush=True)
    run.stop()
    _print_states(run)
    return 0


def _launches() -> Path:
    """A directory with a file for each run launched from here: name -> its directory."""
    return state_directory() / "launches"


def _find(text: str, trusted: bool) -> "Launched":
    """The run of a directory or name; "": the last one. Raises ConfigError."""
    from zapex.clusters.placement import Launched

    known = {path.name: path for path in _launches().glob("*")}
    if text and (Path(text) / FACTS).is_file():
        run = Launched.find(text)
        # Ray unpickles what the cluster sends.
        from_here = str(run.directory) in {read_text(path) for path in known.values()}
        if run.placement.on == "ray" and not (trusted or from_here):
            raise ConfigError(
                f"{text} was not launched from here, and the Ray cluster that it names could run "
                f"code in this process: {run.table.address!r}. If you trust it, give --trust"
            )
        return run
    if not text and not known:
        raise ConfigError("no run was launched from here: name its directory")
    newest = max(known.values(), key=lambda path: path.stat().st_mtime, default=None)
    path = known.get(text) if text else newest
    if path is None:
        near = did_you_mean(text, known)
        raise ConfigError(
            f"no launched run is called {text!r}, and no directory of that name has a {FACTS}{near}"
        )
    return Launched.find(read_text(path))
