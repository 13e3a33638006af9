"""The settings of a run: one frozen dataclass per section, checked when constructed; no I/O.

The defaults are Ape-X's own values (Horgan et al., arXiv 1803.00933), the preset `paper`. Field
names are unique over all sections because each is also a flag: `batch_size` is `--batch-size`. The
text under a field is its help.
"""

import dataclasses
import math
import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, Self

from zapex.agent import LOSSES, NETWORKS
from zapex.config import clusters
from zapex.config.fields import SettingsGroup, check_path, parse_count, setting, toml_value
from zapex.config.words import did_you_mean
from zapex.errors import ConfigError

_MAX_SLOTS = 1 << 19
"""A key has 19 bits for the slot."""


@dataclass(frozen=True)
class EnvConfig(SettingsGroup):
    """Environment."""

    env: str = "ALE/Breakout-v5"
    """The environment: a Gymnasium id, module:Id or module:callable."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for the environment's constructor."""
    wrapper: list[str] = field(default_factory=list)
    """A wrapper, as module:Class; repeat the flag for several, innermost first."""
    max_episode_frames: int = setting(108_000, low=0)
    """Cut an episode after this many frames; 0: never."""
    reward_clip: bool = True
    """Learn from rewards clipped to [-1, 1]; reported scores are never clipped."""

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
    """Actors and exploration."""

    actors: int = setting(8, low=1, high=4096, local=True)
    """Actor processes on this host; auto: what `zapex balance` found. For `zapex replay`: the most
    actors on all hosts together."""
    envs_per_actor: int = setting(16, low=1, high=4096)
    """Environments that each actor steps in lockstep."""
    param_period: int = setting(400, low=1)
    """Frames of one environment between two updates of an actor's parameters."""
    eps_base: float = setting(0.4, low=0.0, high=1.0)
    """Base of the exploration ladder: stream i of N explores with base^(1 + alpha i/(N-1))."""
    eps_alpha: float = setting(7.0, low=0.0)
    """Alpha of the exploration ladder: stream i of N explores with base^(1 + alpha i/(N-1))."""
    exploration: Literal["ladder", "linear"] = "ladder"
    """Ape-X's ladder over the environments, or one line for all, from 1 down to --eps-end."""
    eps_end: float = setting(0.01, low=0.0, high=1.0)
    """With --exploration linear: the final value."""
    exploration_frames: int = setting(1_000_000, low=1)
    """With --exploration linear: frames of the run until the final value."""
    max_chunk_age_steps: int = setting(128, low=1)
    """Send a chunk after this many steps even if it is not full."""
    env_threads: int = setting(1, low=1, local=True)
    """Threads that step the environments of one actor."""
    actor_threads: int = setting(1, low=1, local=True)
    """Threads for the forward pass of one actor on a CPU, or of the inference process with
    --inference central."""
    inference: Literal["cpu", "gpu", "central"] = setting("cpu", local=True)
    """Where actors compute. gpu: each actor on the GPU. central: one process computes for all
    actors of this host, which then don't load torch."""
    inference_device: Literal["auto", "cpu", "cuda"] = setting("auto", local=True)
    """Device of the inference process with --inference central."""
    actor_precision: Literal["auto", "float32", "bfloat16"] = setting("auto", local=True)
    """Precision of the convolutions when acting."""


@dataclass(frozen=True)
class ReplayConfig(SettingsGroup):
    """Replay."""

    capacity: int = setting(2_000_000, low=2, replays=True)
    """Transitions to keep; only the replay's host uses it."""
    alpha: float = setting(0.6, low=0.0)
    """Exponent of priorities: a transition is drawn in proportion to (|priority| + eps)^alpha; 0:
    uniformly."""
    beta: float = setting(0.4, low=0.0)
    """Exponent of importance weights: (N q)^-beta."""
    initial_priority: Literal["actor", "max"] = "actor"
    """Priority of a new transition. actor: the TD error of the actor's own values (Ape-X). max: the
    largest recent one."""
    priority_eps: float = setting(1e-6, above=0.0)
    """Added to each |priority|, so that every transition can be drawn."""
    priority_floor: float = setting(0.0, low=0.0)
    """A |priority| below this counts as this much. 1 with --loss huber --beta 0: LAP (Fujimoto et
    al. 2020)."""
    recency: float = setting(0.0, low=0.0, high=40.0)
    """How much rarer the oldest transition is drawn than a new one of equal priority: exp(recency)
    times, in between geometrically (arXiv 2605.10236); 0: equally often."""
    n_step: int = setting(3, low=1, high=64)
    """Steps whose rewards are summed before bootstrapping."""
    gamma: float = setting(0.99, low=0.0, high=1.0)
    """Discount per step."""
    cut_exploratory: bool = False
    """End an n-step return before an action that is not the greedy one, with a bootstrap from the
    state there (Watkins 1989)."""
    learning_starts: int = setting(50_000, low=1)
    """Transitions in the replay before learning starts."""
    samples_per_insert: float = setting(0.0, low=0.0, replays=True)
    """How often each transition is drawn on average; 0: no limit. Only the replay's host uses
    it."""
    samples_per_insert_tolerance: int = setting(0, low=0, replays=True)
    """Samples by which that ratio may be off; 0: twice the least that cannot deadlock."""
    sampling: Literal["stratified", "independent"] = "stratified"
    """How a batch is drawn."""
    prefetch: int = setting(2, low=1, high=64)
    """Batches requested ahead. From 3 (on a GPU 4), the next batch is gathered or unpacked during a
    learning step."""
    save_replay: Literal["never", "stop", "always"] = setting("never", local=True)
    """Save the replay's contents in the run directory when the run ends, or also at every
    checkpoint, so that --resume continues with them; takes as much disk as memory. Only the
    replay's host uses it."""
    huge_pages: bool = setting(False, local=True)
    """Keep the replay in huge pages, which must be reserved first (see `zapex doctor`)."""


@dataclass(frozen=True)
class LearnerConfig(SettingsGroup):
    """Learner."""

    batch_size: int = setting(512, low=1, high=1 << 16)
    """Transitions per batch."""
    lr: float = setting(0.00025 / 4, above=0.0)
    """Learning rate."""
    optimiser: Literal["rmsprop", "adam", "adam-rel"] = "rmsprop"
    """Centred RMSProp (the paper's), Adam, or Adam whose count of steps begins again with each
    target (arXiv 2412.17113)."""
    rmsprop_decay: float = setting(0.95, low=0.0, high=1.0)
    """Decay of RMSProp's averages."""
    optimiser_eps: float = setting(1.5e-7, above=0.0)
    """Added to the optimiser's denominator."""
    max_grad_norm: float = setting(40.0, low=0.0)
    """Clip gradients to this norm; 0: never."""
    target_period: int = setting(2_500, low=1)
    """Batches between two updates of the target network."""
    average_targets: int = setting(0, low=0, high=1024)
    """Save also a mean of the parameters over about so many of the last targets, which then plays
    instead of the newest parameters; 0: don't."""
    publish_period_s: float = setting(1.0, low=0.0)
    """Minimum seconds between two publications of parameters; 0: after each batch."""
    hidden: int = setting(512, low=1, high=1 << 14)
    """Width of the hidden layer of each head."""
    channels: int = setting(32, low=1, high=1 << 10)
    """Filters of an image network's first convolution; the others have twice as many."""
    network: str = "nature"
    """nature (a CNN for images, else a dense layer), impala, or a custom network, as
    module:Class."""
    dueling: bool = True
    """Separate streams for the state's value and the actions' advantages."""
    layer_norm: bool = False
    """Normalise the output of each dense layer, before its ReLU."""
    max_pool: int = setting(0, low=0, high=256)
    """Pool the output of the convolutions to a square of this side; 0: don't."""
    quantiles: int = setting(0, low=0, high=1024)
    """Learn so many quantiles of the return for each action, with their own loss instead of --loss
    (QR-DQN, Dabney et al. 2018: 200); 0: its mean alone. Only with --network nature."""
    double: bool = True
    """Double DQN: the online network chooses the action of the target."""
    munchausen: bool = False
    """Munchausen DQN targets (Vieillard et al. 2020), instead of --double."""
    share_trunk: bool = False
    """Let the target network have only heads of its own, on the online network's features: one
    forward pass less (arXiv 2506.04398). Only with --network nature."""
    loss: str = "squared"
    """Loss of the TD error: squared (half its square, the paper's; or mse), huber, or a custom loss
    as module:function."""
    device: Literal["auto", "cpu", "cuda"] = setting("auto", local=True)
    """Device of the learner."""
    precision: Literal["auto", "float32", "bfloat16"] = setting("auto", local=True)
    """Precision of the learner's convolutions; heads, targets and loss are always float32."""
    learner_threads: int = setting(1, low=0, local=True)
    """Threads of the learner on a CPU; 0: the fastest number in a trial of a second, then one more
    for each core that becomes idle, if that is faster."""
    gather_threads: int | None = setting(None, low=0, high=64, local=True)
    """Threads that gather the next batch during a step, if the replay is on this host; default: 2
    with a GPU, none on a CPU."""
    replay_device: Literal["cpu", "cuda", "cpu-tensor"] = setting("cpu", local=True)
    """Where the learner keeps the frames that it gathers from. cuda: all of the replay's frames in
    GPU memory, if the replay is on this host. cpu-tensor: the same on a CPU, for tests."""
    cuda_graphs: bool = setting(True, local=True)
    """On a GPU, record a learning step as a CUDA graph and replay it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss == "mse":
            object.__setattr__(self, "loss", "squared")
        if self.loss not in LOSSES:
            check_path(self.loss, "--loss", f"{', '.join(LOSSES)} or ")
        for name in ("quantiles", "share_trunk"):
            if getattr(self, name) and self.network != "nature":
                raise ConfigError(
                    f"--{name.replace('_', '-')} needs --network nature, got {self.network}"
                )
        if self.network not in NETWORKS:
            check_path(self.network, "--network", f"{', '.join(NETWORKS)} or ")


NETWORK_FIELDS = (
    *("network", "hidden", "channels", "dueling", "layer_norm", "max_pool", "quantiles"),
)
"""The fields of LearnerConfig that define the network; a resumed run keeps them."""


@dataclass(frozen=True)
class EvaluatorConfig(SettingsGroup):
    """Evaluation."""

    eval_period_s: float = setting(0.0, low=0.0, local=True)
    """Seconds between two evaluations during training; 0: never."""
    eval_episodes: int = setting(10, low=1, local=True)
    """Episodes per evaluation."""
    eval_epsilon: float = setting(0.001, low=0.0, high=1.0, local=True)
    """Share of random actions in an evaluation."""
    eval_noop_max: int = setting(30, low=0, local=True)
    """Start each game with a random number of no-ops, up to this."""


@dataclass(frozen=True)
class RunConfig(SettingsGroup):
    """Run, limits and output."""

    preset: Literal["auto", "paper", "workstation", "laptop", "smoke"] = setting(
        "paper", local=True
    )
    """Source of all settings that you don't give; auto: chosen for this machine."""
    seed: int = setting(1, low=0, high=2**63 - 1)
    """Random seed."""
    exp: str = setting("apex", local=True)
    """Name of the experiment; part of the run directory's name."""
    run_dir: str = setting("", invocation=True)
    """Directory of the run; default: runs/{env}__{exp}__{seed}__{time}."""
    resume: str = setting("", invocation=True)
    """Run directory to resume. auto: resume --run-dir if it has a checkpoint, else start it."""
    max_frames: int = setting(0, low=0, local=True)
    """Stop after this many environment frames; 0: no limit."""
    max_minutes: float = setting(0.0, low=0.0, local=True)
    """Stop after this many minutes; 0: no limit."""
    stop_at_return: float | None = setting(None, local=True)
    """Stop when an evaluation's mean return reaches this."""
    checkpoint_minutes: float = setting(10.0, low=0.0, local=True)
    """Minutes between two checkpoints; 0: only at the end."""
    numa: Literal["off", "interleave", "gpu"] = setting("off", local=True)
    """NUMA placement. interleave: the replay's memory over all nodes. gpu: the learner near the
    GPU."""
    inline: bool = setting(False, local=True)
    """Run everything in one process and one thread; bit-for-bit repeatable from the seed."""
    plain: bool = setting(False, local=True)
    """Print plain lines instead of the live terminal view."""
    quiet: bool = setting(False, invocation=True)
    """Print only warnings and errors."""
    track: bool = setting(False, local=True)
    """Also log to Weights & Biases; needs pip install "zapex[wandb]"."""
    wandb_project_name: str = setting("zapex", local=True)
    """With --track: the W&B project."""
    wandb_entity: str = setting("", local=True)
    """With --track: the W&B user or team; default: yours."""
    visdom: str = setting("", invocation=True)
    """Also show scores, memory and loss in the Visdom at this URL, e.g. http://localhost:8097."""

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
                "each other forever; 0 chooses it"
            )

    @property
    def streams(self) -> int:
        """Streams of the whole run."""
        return self.actor.actors * self.actor.envs_per_actor

    @property
    def chunk_transitions(self) -> int:
        """K, the most transitions of a chunk; at least n_step."""
        from zapex.chunks.layout import chunk_length  # it imports NumPy

        return chunk_length(self.replay.capacity, self.streams, self.replay.n_step)

    @property
    def slots(self) -> int:
        """Chunk slots: for the capacity, two for each stream, and eight spare ones."""
        from zapex.chunks.layout import slots_needed  # it imports NumPy

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
        """Tables of plain values by section, without None, which TOML cannot express."""
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

    def to_toml(self, without: Collection[str] = ()) -> str:
        """The text of `config.toml`; `from_dict(tomllib.loads(text))` gives the same settings.

        Settings of one invocation (`run_dir`, `resume`) are left out, and those of `without`.
        """
        lines = []
        for section, table in self.to_dict().items():
            lines.append(f"[{section}]")
            lines.extend(
                f"{key} = {toml_value(value, key)}"
                for key, value in table.items()
                if not FIELDS[key][1].metadata.get("invocation", False) and key not in without
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
            continue  # for `zapex launch`
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
