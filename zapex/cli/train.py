"""`zapex train`, `demo`, `config` and `doctor`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zapex.cli import hosts
from zapex.cli.resolve import Options, Resolved, findings, prepared, resolve
from zapex.config.fields import setting
from zapex.config.settings import FIELDS, Config
from zapex.errors import ConfigError
from zapex.host.parts import PARTS

if TYPE_CHECKING:
    from zapex.envs.environments import EnvironmentSpec


@dataclass(frozen=True)
class TrainOptions(Options):
    """Options."""

    seeds: str = ""
    """Train once with each of these seeds, e.g. 1,2,3."""
    parallel: int = setting(1, low=1)
    """Train with so many of --seeds at once, each run with its share of cores and memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.each)) < len(self.each):
            raise ConfigError(f"--seeds must name each seed once, got {self.seeds}")
        if self.parallel > 1 and not self.seeds:
            raise ConfigError(f"--parallel {self.parallel} is for several --seeds: give them")

    @property
    def runs_at_once(self) -> int:
        """As many as asked for, or as there are seeds."""
        return min(self.parallel, len(self.each) or 1)

    @property
    def each(self) -> list[int]:
        """The seeds in their order; none: --seed alone."""
        words = [word.strip() for word in self.seeds.split(",")] if self.seeds else []
        if not all(word.isdecimal() for word in words):
            raise ConfigError(f"--seeds must be numbers with commas, as 1,2,3; got {self.seeds!r}")
        return [int(word) for word in words]


def train(args: list[str]) -> int:
    """`zapex train [ENV]`."""
    what = "Train on this host until stopped, or until a limit is reached."
    run = resolve(args, "train", what, TrainOptions)
    if run.more.seeds:
        if any(word.partition("=")[0] == "--seed" for word in args):
            raise ConfigError(f"--seeds names all seeds: leave --seed {run.config.run.seed} out")
        from zapex.cli.seeds import train_each

        return train_each(run, args)
    from zapex.run.train import train as start

    return start(prepared_run(run), run.spec)


def prepared_run(run: Resolved) -> Config:
    """The settings of a run that can start; prints what to expect of it."""
    config = prepared(run)
    if not config.run.quiet:
        announce(run)
    return config


def announce(run: Resolved) -> None:
    """Print when the run will end, and what to expect of it."""
    from zapex.config.presets import outlook
    from zapex.watch.terminal import print_table

    preset, config = str(run.chosen["preset"].value), run.config
    expected = outlook(preset, run.spec.env_id, config.run.max_minutes, run.spec.atari)
    print_table(f"{_until(config, run.spec)}\n{expected}")


def _until(config: Config, spec: "EnvironmentSpec") -> str:
    """When the run ends by itself, and returns to compare with."""
    limits = config.run
    ends = []
    if limits.max_minutes:
        ends.append(f"{limits.max_minutes:g} minutes are over")
    if limits.max_frames:
        ends.append(f"{limits.max_frames:,} frames are played")
    if limits.stop_at_return is not None:
        ends.append(f"an evaluation's mean return reaches {limits.stop_at_return:g}")
    text = f"Runs until {' or '.join(ends or ['stopped'])}; Ctrl-C ends it and saves."
    if spec.references:
        known = ", ".join(f"{name} {value:g}" for name, value in spec.references.items())
        text += f" Returns to compare with: {known}."
    return text


def demo(args: list[str]) -> int:
    """`zapex demo`: CartPole in about a minute."""
    if {"-h", "--help", "help"} & set(args):
        print("Train CartPole to a mean return of 475 of 500, and draw its learning curve.")
        print("\nUsage: zapex demo [OPTIONS]\n\nTakes the options of `zapex train`.")
        return 0
    return train(["CartPole-v1", "--stop-at-return", "475", "--max-minutes", "5", *args])


@dataclass(frozen=True)
class _ConfigOptions(Options):
    """Options."""

    many_hosts: bool = False
    """Leave out what each host of a run chooses itself, such as --actors and --capacity, unless
    you give it here."""


def config(args: list[str]) -> int:
    """`zapex config [ENV]`: the settings as TOML, with the reason for each in a comment."""
    what = "Print the settings that `zapex train` would use, as TOML for --config."
    part = PARTS["replay" if "--many-hosts" in args else "all"]  # then all machines count
    run = resolve(args, "config", what, _ConfigOptions, part)
    from zapex.config.layers import explain

    chosen, without = run.chosen, set[str]()
    if run.more.many_hosts:
        given = {name for name, one in chosen.items() if one.reason.startswith(("you", "from "))}
        kept = given | run.config.shared().keys() | {"preset", "env"}
        without = FIELDS.keys() - kept
        chosen = {name: one for name, one in chosen.items() if name in kept}
    print(*(f"#{line}" for line in explain(chosen).splitlines()), sep="\n")
    print(run.config.to_toml(without), end="")
    return 0


def doctor(args: list[str]) -> int:
    """`zapex doctor [ENV]`, or `zapex doctor replay|actor|learner`."""
    if args and args[0] in hosts.WHAT:
        return hosts.doctor(args[0], args[1:])
    what = (
        "Check whether this machine has what `zapex train` needs. `zapex doctor replay`, `zapex "
        "doctor actor` and `zapex doctor learner` check one host of several."
    )
    run = resolve(args, "doctor", what)
    from zapex.run import preflight

    return preflight.doctor(findings(run))
