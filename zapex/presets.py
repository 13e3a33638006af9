"""Values that suit a machine and a task, each with its reason."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from zapex.checked import flag_of
from zapex.config import Config
from zapex.errors import ConfigError
from zapex.machine import Machine
from zapex.schema import HEADER_WORDS, ChunkLayout, Schema

_MEMORY_SHARE = 0.40
"""Of the free memory, what a preset gives to the replay; a machine has other work too."""
_MOST_MEMORY_SHARE = 0.85
"""Of the free memory, what a replay may take when asked for; processes need the rest."""


@dataclass(frozen=True)
class Task:
    """What the choice depends on besides the machine; `schema` is the environment's."""

    schema: Schema
    atari: bool

    @property
    def image(self) -> bool:
        """Whether observations are pictures: then the network is convolutional, and slow."""
        return any(len(column.value_shape) == 3 for column in self.schema.obs_columns.values())


class Choice(NamedTuple):
    """A value and why it was chosen."""

    value: Any
    reason: str


Rule = tuple[Any | Callable[[Machine], Any], str]


def _workstation_actors(machine: Machine) -> int:
    return max(1, machine.cores - 2 if machine.gpus else machine.cores // 2)


def _workstation_learner_threads(machine: Machine) -> int:
    return 1 if machine.gpus else max(1, machine.cores - _workstation_actors(machine) - 1)


_TINY = "tiny: it only shows that everything runs"
_ONE_THREAD: dict[str, Rule] = {
    "env_threads": (1, "two roles on two cores: more threads would fight"),
    "actor_threads": (1, "two roles on two cores: more threads would fight"),
    "learner_threads": (1, "two torch threads beside busy actors are slower than one"),
}
_VECTOR_LEARNING: dict[str, Rule] = {
    "optimiser": ("adam", "learns small networks in fewer batches than RMSProp"),
    "lr": (5e-4, "a small network bears large steps"),
    "optimiser_eps": (1e-8, "Adam's usual"),
    "loss": ("huber", "rewards are not clipped here"),
    "max_grad_norm": (10.0, "rewards are not clipped here"),
    "target_period": (250, "short episodes: the target may follow quickly"),
    "hidden": (128, "a few numbers go in, so a small network does"),
    "param_period": (16, "episodes are short"),
    "publish_period_s": (0.1, "parameters are small"),
    "eval_epsilon": (0.0, "the policy itself"),
    "eval_noop_max": (0, "no-ops are Atari's custom"),
}
TABLE: dict[tuple[str, str], dict[str, Rule]] = {
    ("laptop", "image"): {
        "actors": (1, "one core acts, the other learns"),
        "envs_per_actor": (32, "one forward pass for many environments"),
        "capacity": (500_000, "more than an evening's experience on two cores"),
        "learning_starts": (10_000, "seconds of experience instead of minutes"),
        "batch_size": (64, "as fast a sample as in larger batches, and more updates"),
        "n_step": (5, "between 3 and 7: 7 learned sooner, 3 got further"),
        "optimiser": ("adam", "learns from fewer batches than RMSProp"),
        "lr": (2e-4, "with Adam, in a short run"),
        "optimiser_eps": (1e-6, "1.5e-4 learned Breakout many times slower: gradients are small"),
        "target_period": (1_000, "a quarter of a minute"),
        "loss": ("huber", "large errors early on do not dominate"),
        "hidden": (256, "the paper's 512 takes half as long again"),
        "channels": (16, "half of the paper's filters: twice as many samples a second"),
        "eval_period_s": (240.0, "ten games take a core for half a minute"),
        **_ONE_THREAD,
    },
    ("laptop", "vector"): {
        "actors": (1, "one core acts, the other learns"),
        "envs_per_actor": (8, "one forward pass for several environments"),
        "capacity": (100_000, "enough for small tasks"),
        "learning_starts": (1_000, "a second of experience"),
        "batch_size": (128, "small networks learn well from small batches"),
        "eval_period_s": (10.0, "runs are short"),
        **_VECTOR_LEARNING,
        **_ONE_THREAD,
    },
    ("workstation", "image"): {
        "actors": (_workstation_actors, "a core each, less what learner and replay need"),
        "envs_per_actor": (16, "one forward pass for many environments"),
        "capacity": (2_000_000, "the paper's"),
        "learning_starts": (20_000, "fewer actors than the paper's need longer for its 50,000"),
        "eval_period_s": (300.0, "often enough for a curve"),
        "env_threads": (1, "actors have a core each"),
        "actor_threads": (1, "actors have a core each"),
        "learner_threads": (_workstation_learner_threads, "the cores that the actors leave"),
    },
    ("workstation", "vector"): {
        "actors": (lambda machine: min(4, _workstation_actors(machine)), "small tasks need few"),
        "envs_per_actor": (8, "one forward pass for several environments"),
        "capacity": (200_000, "enough for small tasks"),
        "learning_starts": (2_000, "a second of experience"),
        "batch_size": (128, "small networks learn well from small batches"),
        "eval_period_s": (10.0, "runs are short"),
        **_VECTOR_LEARNING,
        "env_threads": (1, "actors have a core each"),
        "actor_threads": (1, "actors have a core each"),
        "learner_threads": (1, "small networks gain nothing from more"),
    },
    ("smoke", "image"): {
        "actors": (1, _TINY),
        "envs_per_actor": (2, _TINY),
        "capacity": (4_096, _TINY),
        "learning_starts": (256, _TINY),
        "batch_size": (16, _TINY),
        "hidden": (32, _TINY),
        "target_period": (20, _TINY),
        "max_frames": (8_000, "seconds, not minutes"),
        "eval_episodes": (1, _TINY),
        **_ONE_THREAD,
    },
    ("smoke", "vector"): {
        "actors": (1, _TINY),
        "envs_per_actor": (2, _TINY),
        "capacity": (4_096, _TINY),
        "learning_starts": (256, _TINY),
        "batch_size": (32, _TINY),
        "max_frames": (4_000, "seconds, not minutes"),
        "eval_episodes": (1, _TINY),
        **_VECTOR_LEARNING,
        **_ONE_THREAD,
    },
    ("paper", "image"): {},
    ("paper", "vector"): {},
}
"""(preset, kind of observation) -> flat setting -> (value or how to find it, reason)."""

SEEN: dict[tuple[str, str], tuple[tuple[float, float], ...]] = {
    ("laptop", "ALE/Breakout-v5"): ((2, 13), (4, 15), (6, 23), (8, 36)),
    ("laptop", "ALE/Pong-v5"): ((4, -13), (6, -9), (9, 11), (11, 18), (16, 21)),
    ("laptop", "CartPole-v1"): ((0.5, 500),),
}
"""What evaluations of a run on two cores came to: (minutes, mean return), of benchmarks/results."""
_FRAMES_PER_MINUTE = 580_000  # of a game on those two cores, acting and learning


def outlook(preset: str, env_id: str, minutes: float, atari: bool) -> str:
    """What to expect of a run of so many minutes (0: no limit), from what was measured."""
    if preset != "laptop":
        return "What to expect: this preset was not measured; the speed is shown as it goes."
    seen = SEEN.get((preset, env_id), ())
    within = [point for point in seen if not minutes or point[0] <= minutes]
    if within:
        reached, value = within[-1]
        return (
            f"What to expect: a run on two cores had a mean return of "
            f"{value:g} after {reached:g} minutes."
        )
    if not atari:
        return "What to expect: this environment was not measured; small tasks take minutes."
    frames = f"{minutes * _FRAMES_PER_MINUTE / 1e6:.1f} M" if minutes else "35 M an hour"
    return f"What to expect: about {frames} frames on two cores; this game was not measured."


def choose(preset: str, task: Task, machine: Machine) -> dict[str, Choice]:
    """Values by flat setting name, for `Config.replace`; `auto` becomes what it stands for."""
    chosen: dict[str, Choice] = {}
    if preset == "auto":
        preset = "workstation" if machine.gpus or machine.cores > 4 else "laptop"
        chosen["preset"] = Choice(preset, f"this machine has {machine}")
    else:
        chosen["preset"] = Choice(preset, "asked for")
    for name, (value, reason) in TABLE[preset, "image" if task.image else "vector"].items():
        chosen[name] = Choice(value(machine) if callable(value) else value, reason)
    if task.atari:
        chosen["reward_clip"] = Choice(True, "Atari's scores differ a thousandfold between games")
    else:
        chosen["reward_clip"] = Choice(False, "clipping is Atari's custom")
    if preset != "paper":
        chosen["capacity"] = _capped(chosen["capacity"], task, machine, chosen)
    return chosen


def _capped(wanted: Choice, task: Task, machine: Machine, chosen: Mapping[str, Choice]) -> Choice:
    """The capacity wanted, or what the memory share holds."""
    share = int(_MEMORY_SHARE * machine.memory_bytes)
    config = Config().replace(actors=chosen["actors"].value, learning_starts=1, batch_size=1)
    most = _capacity_in(share, task.schema, config)
    if wanted.value <= most:
        return wanted
    reason = f"{_MEMORY_SHARE:.0%} of {machine.memory_bytes / 2**30:.1f} GiB free memory"
    return Choice(most, reason)


def replay_bytes(schema: Schema, config: Config) -> int:
    """Shared memory that the run's experience needs: slots, their headers, and the sum tree."""
    chunk = config.chunk_transitions
    slot_bytes = ChunkLayout(schema, chunk).body_bytes + 8 * HEADER_WORDS + 10 * chunk
    return config.slots * slot_bytes


def _capacity_in(share_bytes: int, schema: Schema, config: Config) -> int:
    """The largest round capacity whose replay fits in `share_bytes`; 0 where none does."""

    def fits(capacity: int) -> bool:
        try:
            smaller = config.replace(capacity=capacity, learning_starts=1, batch_size=1)
        except ConfigError:
            return False
        return replay_bytes(schema, smaller) <= share_bytes

    low, high = 0, 1 << 25
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    unit: int = 10 ** max(0, len(str(low)) - 2)
    return low // unit * unit


def check_memory(config: Config, schema: Schema, machine: Machine) -> None:
    """Raises ConfigError, naming the capacity that would fit, where the replay does not.

    Reserved huge pages are none of the free memory; they are counted before the start.
    """
    if config.replay.huge_pages:
        return
    needed = replay_bytes(schema, config)
    room = int(_MOST_MEMORY_SHARE * machine.memory_bytes)
    if needed <= room:
        return
    fitting = _capacity_in(room, schema, config)
    mend = f"--capacity {fitting} fits" if fitting >= 2 else "use fewer --actors"
    raise ConfigError(
        f"--capacity {config.replay.capacity:,} needs {needed / 2**30:.2f} GiB of shared memory, "
        f"and {room / 2**30:.2f} GiB may be taken here ({_MOST_MEMORY_SHARE:.0%} of what is "
        f"free): {mend}"
    )


def explain(chosen: Mapping[str, Choice]) -> str:
    """The settings as a table of lines: flag, value, reason."""
    rows = [(flag_of(name), _show(value), reason) for name, (value, reason) in chosen.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c}" for a, b, c in rows)


def _show(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
