"""The settings of a run: one frozen dataclass for each group, checked when made; no I/O.

The defaults are Ape-X's own values (Horgan et al., arXiv 1803.00933), the preset `paper`. Field
names are unique over all sections, because each is also a flag: `batch_size` is `--batch-size`.
The text under a field is its help.
"""

import dataclasses
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, Self

from zapex.chunks.sizes import chunk_length, slots_needed
from zapex.config import clusters
from zapex.config.fields import SettingsGroup, bounded, check_path, parse_count, toml_value
from zapex.config.learner import LearnerConfig
from zapex.config.words import did_you_mean
from zapex.errors import ConfigError

_MAX_SLOTS = 1 << 19
"""A key has 19 bits for the slot."""


@dataclass(frozen=True)
class EnvConfig(SettingsGroup):
    """What is played."""

    env: str = "ALE/Breakout-v5"
    """Environment: a Gymnasium id, or module:Id, or module:callable."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for the environment's constructor."""
    wrapper: list[str] = field(default_factory=list)
    """A wrapper as module:Class; give the flag once for each, the innermost first."""
    max_episode_frames: int = bounded(108_000, low=0)
    """Cut an episode after this many frames; 0: never."""
    reward_clip: bool = True
    """Learn from rewards clipped to [-1, 1]; scores are reported as the game gives them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.env.strip():
            raise ConfigError(f"--env must name an environment, got {self.env!r}: try CartPole-v1")
        for wrapper in self.wrapper:
            check_path(wrapper, "--wrapper")
        for name, value in self.env_kwargs.items():
            toml_value(value, f"--env-kwargs {name}")


@dataclass(frozen=True)
class ActorConfig(SettingsGroup):
    """Who plays, and how greedily."""

    actors: int = bounded(8, low=1, high=4096, local=True)
    """Actor processes of this host; `auto`: as `zapex balance` has found. For `zapex replay`:
    the most on all hosts together."""
    envs_per_actor: int = bounded(16, low=1, high=4096)
    """Environments that one actor steps in lockstep."""
    param_period: int = bounded(400, low=1)
    """Frames of one stream between two pulls of parameters."""
    eps_base: float = bounded(0.4, low=0.0, high=1.0)
    """Exploration of stream i of N is base^(1 + alpha i/(N-1)): the base."""
    eps_alpha: float = bounded(7.0, low=0.0)
    """Exploration of stream i of N is base^(1 + alpha i/(N-1)): the alpha."""
    exploration: Literal["ladder", "linear"] = "ladder"
    """Ape-X's ladder over the streams, or for all streams a line from 1 to --eps-end."""
    eps_end: float = bounded(0.01, low=0.0, high=1.0)
    """With --exploration linear: where the line ends."""
    exploration_frames: int = bounded(1_000_000, low=1)
    """With --exploration linear: after how many frames of the run it ends."""
    max_chunk_age_steps: int = bounded(128, low=1)
    """Hand a chunk over after this many steps even when it is not full."""
    env_threads: int = bounded(1, low=1, local=True)
    """Threads that step the environments of one actor."""
    actor_threads: int = bounded(1, low=1, local=True)
    """Threads of one actor's forward pass on a CPU, or of the role of `--inference central`."""
    inference: Literal["cpu", "gpu", "central"] = bounded("cpu", local=True)
    """Where actors compute: gpu is one forward pass there for all streams of an actor; central, one
    role computes for all actors of this host, which then load no torch."""
    inference_device: Literal["auto", "cpu", "cuda"] = bounded("auto", local=True)
    """Where the role of `--inference central` computes."""
    actor_precision: Literal["auto", "float32", "bfloat16"] = bounded("auto", local=True)
    """Precision of the convolutions when acting."""


@dataclass(frozen=True)
class ReplayConfig(SettingsGroup):
    """What the replay keeps, and how it draws."""

    capacity: int = bounded(2_000_000, low=2, replays=True)
    """Transitions kept; only the replay's host uses it."""
    alpha: float = bounded(0.6, low=0.0)
    """Leaf = (|priority| + eps)^alpha; 0 draws uniformly."""
    beta: float = bounded(0.4, low=0.0)
    """Importance weights = (N q)^-beta."""
    initial_priority: Literal["actor", "max"] = "actor"
    """A new transition's: the TD error of the actor's own values (Ape-X), or the largest so far."""
    priority_eps: float = bounded(1e-6, above=0.0)
    """Added to each |priority|, so that every transition can be drawn."""
    n_step: int = bounded(3, low=1, high=64)
    """Steps whose rewards are summed before bootstrapping."""
    gamma: float = bounded(0.99, low=0.0, high=1.0)
    """Discount of one step."""
    learning_starts: int = bounded(50_000, low=1)
    """Transitions that the replay must hold before the first is drawn."""
    samples_per_insert: float = bounded(0.0, low=0.0, replays=True)
    """How often a transition is drawn on average; 0: no limit. Only the replay's host uses it."""
    samples_per_insert_tolerance: int = bounded(0, low=0, replays=True)
    """Samples by which that ratio may be off; 0: twice the least that cannot deadlock."""
    sampling: Literal["stratified", "independent"] = "stratified"
    """How a batch is drawn."""
    prefetch: int = bounded(2, low=1, high=64)
    """Batches asked for ahead; from 3 on (on a GPU 4), the next is gathered or unpacked during a
    step."""
    save_replay: Literal["never", "stop", "always"] = bounded("never", local=True)
    """Save the memory in the run's directory when the run ends, or at every checkpoint too, so that
    --resume goes on with it; a full one takes as much disk as memory. Only the replay's host uses
    it."""
    huge_pages: bool = bounded(False, local=True)
    """Keep the memory in huge pages, which must be reserved before (zapex doctor says how)."""


@dataclass(frozen=True)
class EvaluatorConfig(SettingsGroup):
    """How the policy is evaluated, apart from training."""

    eval_period_s: float = bounded(0.0, low=0.0, local=True)
    """Seconds between two evaluations during training; 0: never."""
    eval_episodes: int = bounded(10, low=1, local=True)
    """Episodes of one evaluation."""
    eval_epsilon: float = bounded(0.001, low=0.0, high=1.0, local=True)
    """Share of random actions in an evaluation."""
    eval_noop_max: int = bounded(30, low=0, local=True)
    """Start a game with a random number of no-ops, up to this."""


@dataclass(frozen=True)
class RunConfig(SettingsGroup):
    """How long the run lasts, and where it is written."""

    preset: Literal["auto", "paper", "workstation", "laptop", "smoke"] = bounded(
        "paper", local=True
    )
    """The source of settings that you do not give; `auto` looks at this machine."""
    seed: int = bounded(1, low=0, high=2**63 - 1)
    """Seed of all random numbers."""
    exp: str = bounded("apex", local=True)
    """Name of the experiment; part of the run directory's name."""
    run_dir: str = bounded("", invocation=True)
    """Directory of the run; empty: runs/{env}__{exp}__{seed}__{time}."""
    resume: str = bounded("", invocation=True)
    """Run directory to continue. auto: that of --run-dir if it has a checkpoint; else start it."""
    max_frames: int = bounded(0, low=0, local=True)
    """Stop after this many environment frames; 0: no limit."""
    max_minutes: float = bounded(0.0, low=0.0, local=True)
    """Stop after this many minutes; 0: no limit."""
    stop_at_return: float | None = bounded(None, local=True)
    """Stop when an evaluation's mean return reaches this."""
    checkpoint_minutes: float = bounded(10.0, low=0.0, local=True)
    """Minutes between two checkpoints; 0: only at the end."""
    numa: Literal["off", "interleave", "gpu"] = bounded("off", local=True)
    """NUMA nodes: `interleave` the replay's memory, or keep the learner near the `gpu`."""
    inline: bool = bounded(False, local=True)
    """Everything in one process and one thread, repeatable bit for bit from the seed."""
    plain: bool = bounded(False, local=True)
    """Plain lines instead of the live terminal view."""
    track: bool = bounded(False, local=True)
    """Log to Weights & Biases too; needs pip install "zapex[wandb]"."""
    wandb_project_name: str = bounded("zapex", local=True)
    """With --track: the project there."""
    wandb_entity: str = bounded("", local=True)
    """With --track: the user or team there; empty: your own."""
    visdom: str = bounded("", invocation=True)
    """Show scores, memory and loss in the Visdom at this URL too, as http://localhost:8097."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[\w.+=@-]+", self.exp):
            raise ConfigError(
                "--exp must be letters, digits and any of . _ - + = @, because it is part of a "
                f"directory's name; got {self.exp!r}"
            )


@dataclass(frozen=True)
class Config:
    """All settings of a run. Raises ConfigError if they do not fit together."""

    env: EnvConfig = field(default_factory=EnvConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        replay, batch_size = self.replay, self.learner.batch_size
        if replay.learning_starts > replay.capacity:
            raise ConfigError(
                f"--learning-starts must be at most --capacity ({replay.capacity:,}), "
                f"got {replay.learning_starts:,}: no learning would ever start"
            )
        if replay.n_step > replay.capacity:
            raise ConfigError(
                f"--n-step must be at most --capacity ({replay.capacity:,}), got {replay.n_step}: "
                "no chunk would fit"
            )
        if batch_size > replay.learning_starts:
            raise ConfigError(
                f"--batch-size must be at most --learning-starts ({replay.learning_starts:,}), "
                f"got {batch_size:,}: lower the one or raise the other"
            )
        if self.slots > _MAX_SLOTS:
            raise ConfigError(
                f"capacity and streams must need at most {_MAX_SLOTS:,} slots, got "
                f"{self.slots:,}: lower --capacity ({replay.capacity:,}) or the number of "
                f"streams ({self.streams:,})"
            )
        if self.run.stop_at_return is not None and not self.evaluator.eval_period_s:
            raise ConfigError(
                "--stop-at-return needs evaluations to compare with, and --eval-period-s is 0: "
                "give it a number of seconds"
            )
        tolerance = replay.samples_per_insert_tolerance
        if replay.samples_per_insert > 0 and 0 < tolerance < self.smallest_tolerance:
            raise ConfigError(
                f"--samples-per-insert-tolerance must be at least {self.smallest_tolerance:,} "
                f"(one grant plus one batch), got {tolerance:,}: actors and learner would wait for "
                "each other for ever; 0 chooses it"
            )

    @property
    def streams(self) -> int:
        """Streams of the whole run."""
        return self.actor.actors * self.actor.envs_per_actor

    @property
    def chunk_transitions(self) -> int:
        """K, the most transitions of a chunk; at least n_step."""
        return chunk_length(self.replay.capacity, self.streams, self.replay.n_step)

    @property
    def slots(self) -> int:
        """Chunk slots: for the capacity, two for each stream, and eight spare ones."""
        return slots_needed(self.replay.capacity, self.chunk_transitions, self.streams)

    @property
    def smallest_tolerance(self) -> int:
        """Samples by which one grant and one batch move the limiter; below it: deadlock."""
        grant = self.actor.envs_per_actor * self.chunk_transitions
        return math.ceil(Fraction(self.replay.samples_per_insert) * grant) + self.learner.batch_size

    @property
    def limiter_tolerance(self) -> int:
        """The tolerance given, or twice the smallest that works."""
        return self.replay.samples_per_insert_tolerance or 2 * self.smallest_tolerance

    def replace(self, **values: Any) -> Self:
        """A copy with fields, named as the flags are, set to `values`.

        Raises:
            ConfigError: no field has this name (with the nearest one), or the copy is not valid.
        """
        return dataclasses.replace(self, **merged(vars(self), values))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Tables of plain values by section; None is left out, as TOML has no word for it."""
        tables = dataclasses.asdict(self)
        return {
            section: {key: value for key, value in table.items() if value is not None}
            for section, table in tables.items()
        }

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; what `tables` leaves out is the default.

        Raises:
            ConfigError: an unknown table or key (with the nearest name), or a value that
                cannot work.
        """
        return cls().replace(**flatten(tables))

    def to_toml(self) -> str:
        """The text of `config.toml`; `from_dict(tomllib.loads(text))` gives the same settings.

        It leaves out what belongs to one invocation (`run_dir`, `resume`).
        """
        lines = []
        for section, table in self.to_dict().items():
            lines.append(f"[{section}]")
            lines.extend(
                f"{key} = {toml_value(value, key)}"
                for key, value in table.items()
                if not FIELDS[key][1].metadata.get("invocation", False)
            )
            lines.append("")
        return "\n".join(lines)

    def shared(self, replays: bool = False) -> dict[str, Any]:
        """Values by field that must be equal on all hosts of one run.

        replays: also those that only the replay's host uses.
        """
        return {
            name: getattr(getattr(self, section), name)
            for name, (section, spec) in FIELDS.items()
            if not spec.metadata.get("local", False)
            and (replays or not spec.metadata.get("replays", False))
        }


SECTIONS: dict[str, type[SettingsGroup]] = typing.get_type_hints(Config)
FIELDS: dict[str, tuple[str, "dataclasses.Field[Any]"]] = {
    spec.name: (section, spec)
    for section, kind in SECTIONS.items()
    for spec in dataclasses.fields(kind)
}
"""Field name -> (its section, its dataclass field)."""


def _section_of(name: str) -> str:
    if name not in FIELDS:
        raise ConfigError(f"no setting is called {name!r}{did_you_mean(name, FIELDS)}")
    return FIELDS[name][0]


def merged(sections: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections by name with flat `values` put in; each is checked, but not against the others.

    Raises:
        ConfigError: a name is no field (with the nearest one), or a value cannot work.
    """
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        changes.setdefault(_section_of(name), {})[name] = value
    return {
        name: dataclasses.replace(section, **changes.get(name, {}))
        for name, section in sections.items()
    }


def flatten(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Values by field name out of tables by section, as read from TOML; counts may be text.

    Raises:
        ConfigError: an unknown table or key, with the nearest name.
    """
    flat: dict[str, Any] = {}
    clusters.check(tables)
    for section, table in tables.items():
        if section in clusters.TABLES:
            continue  # they place a run's hosts, and are no settings of the run
        if section not in SECTIONS or not isinstance(table, Mapping):
            raise ConfigError(
                f"a config file has the tables {', '.join(SECTIONS)}; got {section!r}"
                f"{did_you_mean(section, [*SECTIONS, *clusters.TABLES])}"
            )
        for key, value in table.items():
            home = _section_of(key)
            if home != section:
                raise ConfigError(f"{key!r} belongs in the table [{home}], got it in [{section}]")
            is_count = FIELDS[key][1].type is int and isinstance(value, str)
            flat[key] = parse_count(value) if is_count else value
    return flat
