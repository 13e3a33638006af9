"""`zapex launch`, `status`, `logs` and `stop`: a run whose hosts a scheduler places."""

import os
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zapex.cli import watching
from zapex.cli.flags import parse, read_settings
from zapex.cli.resolve import check_trust
from zapex.clusters.host import FACTS
from zapex.config.clusters import TABLES
from zapex.config.words import did_you_mean
from zapex.errors import ConfigError

if TYPE_CHECKING:
    from zapex.clusters.launched import Launched

_STALE_S = 60.0  # a run's parent writes its snapshot every five seconds


@dataclass(frozen=True)
class _LaunchOptions:
    """What is launched, and where."""

    file: str = ""
    """Settings, with the table of the scheduler: [slurm], [kubernetes] or [ray]."""
    on: str = ""
    """slurm, kubernetes or ray; left out: the one whose table the file has."""
    name: str = ""
    """Name of the run at the scheduler; left out: from the time."""
    dir: str = ""
    """A new directory for keys and output; on SLURM and Ray all hosts must see it. [runs/NAME]"""
    dry_run: bool = False
    """Check, print what would be submitted, and submit nothing."""
    trust: bool = False
    """Run the module that the file names as its environment."""
    attach: bool = False
    """FILE is the directory or name of a run on Ray: watch it again, and give hosts their keys."""


def launch(args: list[str]) -> int:
    """Hand a run to a scheduler, wait up to 30 seconds for its hosts, and say what is missing."""
    what = "Place a run's hosts with SLURM, Kubernetes or Ray. `zapex status NAME` asks for them."
    options = parse(_LaunchOptions(), args, "launch", what, "file")
    if options.attach:
        return _watch(_found(options.file))
    values = read_settings(options.file)
    check_trust(options.file, values, {}, options.trust)
    on = options.on or _only_table(options.file)
    from zapex.clusters import launched
    from zapex.clusters.placement import place

    name = options.name or time.strftime("zapex-%m%d-%H%M%S")
    directory = Path(options.dir or f"runs/{name}").absolute()
    placement = place(on, name, directory, launched.settings_of(options.file))
    for note in placement.notes:
        print(f"note: {note}", file=sys.stderr)
    if options.dry_run:
        print(launched.adapter_of(placement).text(), end="")
        return 0
    run = launched.launch(options.file, on, name=name, directory=directory)
    _remember(name, directory)
    print(f"{name} is submitted; its directory is {directory}", flush=True)
    hosts = run.wait_for_start(lambda line: print(line, flush=True))
    if any(host.state == "pending" for host in hosts):
        print("it starts when there is room; nothing has to be done")
    print(f"zapex status {name}    zapex logs learner {name}    zapex stop {name}")
    return _watch(run)


def _watch(run: "Launched") -> int:
    """Where the scheduler needs somebody who watches: until the run is over."""
    from zapex.clusters import launched

    watch = getattr(launched.adapter_of(run.placement), "watch", None)
    return int(watch(run.ids)) if watch is not None else 0


def _only_table(path: str) -> str:
    tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    found = [on for on in TABLES if on in tables]
    if len(found) == 1:
        return found[0]
    have = f"it has {', '.join(f'[{on}]' for on in found)}" if found else "it has none of them"
    raise ConfigError(f"{path} must have one of [slurm], [kubernetes], [ray], or give --on; {have}")


@dataclass(frozen=True)
class _RunOptions:
    """Which run."""

    run: str = ""
    """Its name or directory; left out: the run launched last."""


@dataclass(frozen=True)
class _StatusOptions(_RunOptions):
    """Which run, or one host's health."""

    probe: str = ""
    """The run directory of one host: exit code 1 if it does not work (for a scheduler's probes)."""
    replay: str = ""
    """With --probe: an address at which a replay must answer."""


def status(args: list[str]) -> int:
    """What the scheduler says of each host, and the learner's last numbers."""
    what = "Say what the hosts of a launched run do, and what those lack that wait."
    options = parse(_StatusOptions(), _named(args, "run"), "status", what)
    if options.probe:
        return _probe(Path(options.probe), options.replay)
    run = _found(options.run)
    from zapex.clusters.launched import summary

    print(f"{run.placement.name} on {run.placement.on}, {run.placement.directory}")
    print(*summary(run.states()), sep="\n")
    return 0


def _probe(run_dir: Path, url: str) -> int:
    """Ask one role on this host: its socket, and the time of what its parent has written last."""
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
        print(f"{run_dir} has not begun to work")
        return 0  # whom it waits for is not its own fault; a scheduler must not kill it
    print(f"{run_dir} has worked {age_s:.0f} s ago")
    return int(age_s > _STALE_S)


@dataclass(frozen=True)
class _LogsOptions(_RunOptions):
    """Which hosts, and how much."""

    role: str = ""
    """replay, learner or actor."""
    lines: int = 50
    """The last lines of each host."""


def logs(args: list[str]) -> int:
    """The last lines that the hosts of one role printed."""
    what = "Print what the hosts of a role have said: zapex logs ROLE [RUN]."
    options = parse(_LogsOptions(), _named(args, "role", "run"), "logs", what)
    if not options.role:
        raise ConfigError("`zapex logs` needs a role: zapex logs learner [RUN]")
    print(_found(options.run).log(options.role, options.lines))
    return 0


def stop(args: list[str]) -> int:
    """End the run: the learner saves, then every host ends."""
    what = "End a run. The learner saves a checkpoint first."
    options = parse(_RunOptions(), args, "stop", what, "run", optional=True)
    if watching.is_local(options.run):
        return watching.stop(options.run)
    run = _found(options.run)
    print(f"ending {run.placement.name}; the learner saves first", flush=True)
    run.stop()
    from zapex.clusters.launched import summary

    print(*summary(run.states()), sep="\n")
    return 0


def _named(args: list[str], *names: str) -> list[str]:
    """The same words; the first ones that follow no flag are the values of flags `names`."""
    words, left = list[str](), list(names)
    for before, word in zip(["", *args], args, strict=False):
        is_value = before.startswith("--") and "=" not in before
        bare = not word.startswith("-") and not is_value and left
        words += [f"--{left.pop(0)}", word] if bare else [word]
    return words


def _launches() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "zapex" / "launches"


def _remember(name: str, directory: Path) -> None:
    _launches().mkdir(parents=True, exist_ok=True)
    (_launches() / name).write_text(str(directory), encoding="utf-8")


def _found(text: str) -> "Launched":
    """The run of a directory or name; "": the one launched last. Raises ConfigError."""
    from zapex.clusters.launched import Launched

    names = sorted(_launches().glob("*"), key=lambda path: path.stat().st_mtime)
    if not text and not names:
        raise ConfigError("no run was launched from here: name its directory")
    if text and (Path(text) / FACTS).is_file():
        return Launched.find(text)
    known = {path.name: path for path in names}
    path = known.get(text) if text else names[-1]
    if path is None:
        near = did_you_mean(text, known)
        raise ConfigError(
            f"no launched run is called {text!r}, and no directory has its {FACTS}{near}"
        )
    return Launched.find(path.read_text(encoding="utf-8"))
