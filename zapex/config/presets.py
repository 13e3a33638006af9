"""Presets: settings that suit a machine and a task, each with its reason."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zapex.chunks.layout import HEADER_WORDS, ChunkLayout
from zapex.chunks.schema import Schema
from zapex.config.layers import Choice
from zapex.config.settings import Config, RunConfig
from zapex.errors import ConfigError
from zapex.machine.resources import Machine

_MEMORY_SHARE = 0.40
"""Share of free memory that a preset gives to the replay; the machine has other work too."""
_MOST_MEMORY_SHARE = 0.85
"""Share of free memory that a replay may take on request; processes need the rest."""
_GPU_SHARE = 0.5
"""Share of a GPU's memory that a preset gives to frames; networks and other programs need some."""
PROCESS_BYTES = 300 << 20
"""Private memory of a role with torch and the emulators: 220 MiB and more."""
LIGHT_PROCESS_BYTES = 150 << 20
"""Private memory of an actor without torch, with --inference central."""
_MANY_ACTORS = 16
"""With more, a replay of two million would turn over faster than the target network changes."""
_LEAST = {"learning_starts": 1, "batch_size": 1}
_REUSE = 8.0
"""Samples per insert where the replay cannot grow with the actors: a usual value for DQN."""


@dataclass(frozen=True)
class Task:
    """What a preset depends on besides the machine.

    schema, atari: the environment's. nature: the network is the built-in one. any_loss: the user
    names no loss.
    """

    schema: Schema
    atari: bool
    nature: bool = True
    any_loss: bool = True

    @property
    def image(self) -> bool:
        """Whether observations are images, so that the network is convolutional, and slow."""
        return any(len(column.value_shape) == 3 for column in self.schema.obs_columns.values())


@dataclass(frozen=True)
class Host:
    """The machine, and the name of the part of the run that it has, as in zapex.host.parts."""

    machine: Machine
    part: str = "all"

    @property
    def replay_share(self) -> int:
        """Bytes that a preset gives to the replay."""
        return int(_MEMORY_SHARE * self.machine.memory_bytes)

    @property
    def keeps_all(self) -> bool:
        """Whether this host keeps the experience of other hosts' actors."""
        return self.part.startswith("replay")

    @property
    def most_actors(self) -> int:
        """The most actors that fit in the same share of memory, with the other roles."""
        return max(1, self.replay_share // PROCESS_BYTES - 4)


Rule = tuple[Any | Callable[[Host], Any], str]


def _workstation_actors(host: Host) -> int:
    """Actors of this host; for the replay's host, the most on all hosts together."""
    cores = host.machine.cores
    if host.keeps_all:
        return max(32, 2 * cores)
    if host.part == "learner":
        return 1  # it runs none
    if host.part.startswith("actor"):  # the relay takes one core, or on many cores a few
        wanted = cores if cores <= 4 else cores - min(3, -(-cores // 16))
    elif host.machine.learns_on_gpu:
        wanted = cores - (2 if cores <= 8 else 3 if cores <= 32 else 4)
    else:  # the learner's batches are the bound: more actors would overrun it
        wanted = min(_MANY_ACTORS, cores // 2)
    return max(1, min(wanted, host.most_actors))


def _few_actors(host: Host) -> int:
    return min(32 if host.keeps_all else 4, _workstation_actors(host))


def _laptop_actors(host: Host) -> int:
    return max(1, min(host.machine.cores // 2, host.most_actors))


def _learner_threads(host: Host) -> int:
    """0: a trial at the start, then one more for each idle core."""
    return 1 if host.machine.learns_on_gpu else 0


def _large_capacity(host: Host) -> int:
    """The paper's two million, for each sixteen actors."""
    return max(2_000_000, 125_000 * _workstation_actors(host))


_TINY = "tiny: only shows that everything runs"
_TINY_RUN: dict[str, Rule] = {
    "actors": (1, _TINY),
    "envs_per_actor": (2, _TINY),
    "capacity": (4_096, _TINY),
    "learning_starts": (256, _TINY),
    "eval_episodes": (1, _TINY),
}
_ONE_THREAD: dict[str, Rule] = {
    "env_threads": (1, "two roles on two cores: more threads would compete"),
    "actor_threads": (1, "two roles on two cores: more threads would compete"),
    "learner_threads": (1, "two torch threads next to busy actors are slower than one"),
}
_SMALL_TASK: dict[str, Rule] = {
    "envs_per_actor": (8, "one forward pass for several environments"),
    "batch_size": (128, "small networks learn well from small batches"),
    "eval_period_s": (10.0, "runs are short"),
}
_VECTOR_LEARNING: dict[str, Rule] = {
    "optimiser": ("adam", "learns small networks in fewer batches than RMSProp"),
    "lr": (5e-4, "a small network tolerates large steps"),
    "optimiser_eps": (1e-8, "Adam's usual"),
    "loss": ("huber", "rewards are not clipped here"),
    "max_grad_norm": (10.0, "rewards are not clipped here"),
    "target_period": (250, "episodes are short: the target network can follow quickly"),
    "hidden": (128, "few inputs, so a small network is enough"),
    "param_period": (16, "episodes are short"),
    "publish_period_s": (0.1, "parameters are small"),
    "eval_epsilon": (0.0, "the policy itself"),
    "eval_noop_max": (0, "no-ops are customary for Atari"),
}
TABLE: dict[tuple[str, str], dict[str, Rule]] = {
    ("laptop", "image"): {
        "actors": (_laptop_actors, "half of the cores act, the others learn"),
        "envs_per_actor": (32, "one forward pass for many environments"),
        "capacity": (500_000, "more than an evening's experience on two cores"),
        "learning_starts": (10_000, "seconds of experience instead of minutes"),
        "batch_size": (64, "as fast per sample as larger batches, with more updates"),
        "n_step": (5, "between 3 and 7: 7 learned faster at first, 3 reached more"),
        "initial_priority": ("max", "new transitions are drawn soon: more was learned a frame"),
        "optimiser": ("adam", "learns from fewer batches than RMSProp"),
        "lr": (3e-4, "2e-4 learned Krull more slowly, 5e-4 Boxing"),
        "optimiser_eps": (3e-6, "less began slowly on Road Runner, 50 times as much on Breakout"),
        "target_period": (300, "4 to 12 seconds; 1,000 learned Boxing more slowly"),
        "average_targets": (8, "9 of 11 networks played better with it"),
        "loss": ("huber", "large errors early on do not dominate"),
        "hidden": (256, "the paper's 512 takes 1.5 times as long"),
        "channels": (16, "half of the paper's filters: twice the samples per second"),
        "quantiles": (32, "learn more from each sample than a mean does"),
        "share_trunk": (True, "one forward pass of three less"),
        "layer_norm": (True, "learned Road Runner three times as fast, and Boxing as fast"),
        "eval_period_s": (240.0, "ten games occupy a core for half a minute"),
        **_ONE_THREAD,
        "learner_threads": (_learner_threads, "0: tried at the start, then one per idle core"),
    },
    ("laptop", "vector"): {
        "actors": (1, "one core acts, the other learns"),
        "capacity": (100_000, "enough for small tasks"),
        "learning_starts": (1_000, "a second of experience"),
        **_SMALL_TASK,
        **_VECTOR_LEARNING,
        **_ONE_THREAD,
    },
    ("workstation", "image"): {
        "actors": (_workstation_actors, "one per core, minus what the other roles need"),
        "envs_per_actor": (16, "one forward pass for many environments"),
        "capacity": (_large_capacity, "the paper's, for each sixteen actors"),
        "learning_starts": (20_000, "fewer actors than the paper's take longer to fill 50,000"),
        "n_step": (5, "as on a laptop"),
        "optimiser": ("adam", "learns from fewer batches than RMSProp"),
        "lr": (1e-4, "with Adam, for batches of 512"),
        "optimiser_eps": (1e-6, "1.5e-4 learned Breakout many times slower"),
        "target_period": (500, "the paper's 2,500 are for days of learning"),
        "loss": ("huber", "large errors early on do not dominate"),
        "prefetch": (4, "the next batch is gathered or unpacked during a step, also on a GPU"),
        "eval_period_s": (300.0, "often enough for a curve"),
        "env_threads": (1, "each actor has its own core"),
        "actor_threads": (1, "each actor has its own core"),
        "learner_threads": (_learner_threads, "1 with a GPU; 0: tried, then one per idle core"),
    },
    ("workstation", "vector"): {
        "actors": (_few_actors, "small tasks need few"),
        "capacity": (200_000, "enough for small tasks"),
        "learning_starts": (2_000, "a second of experience"),
        **_SMALL_TASK,
        **_VECTOR_LEARNING,
        "env_threads": (1, "each actor has its own core"),
        "actor_threads": (1, "each actor has its own core"),
        "learner_threads": (1, "small networks gain nothing from more"),
    },
    ("smoke", "image"): {
        **_TINY_RUN,
        "batch_size": (16, _TINY),
        "hidden": (32, _TINY),
        "target_period": (20, _TINY),
        "max_frames": (8_000, "seconds, not minutes"),
        **_ONE_THREAD,
    },
    ("smoke", "vector"): {
        **_TINY_RUN,
        "batch_size": (32, _TINY),
        "max_frames": (4_000, "seconds, not minutes"),
        **_VECTOR_LEARNING,
        **_ONE_THREAD,
    },
    ("paper", "image"): {},
    ("paper", "vector"): {},
}
"""(preset, kind of observation) -> setting -> (value or a function of the host, reason)."""

SEEN: dict[tuple[str, str], tuple[float, float]] = {
    ("laptop", "ALE/BeamRider-v5"): (20, 4584),
    ("laptop", "ALE/Breakout-v5"): (20, 30),
    ("laptop", "ALE/MsPacman-v5"): (20, 2007),
    ("laptop", "ALE/Pong-v5"): (20, -7),
    ("laptop", "ALE/Qbert-v5"): (20, 4160),
    ("laptop", "ALE/SpaceInvaders-v5"): (20, 577),
    ("laptop", "CartPole-v1"): (0.5, 500),
    ("workstation", "ALE/Breakout-v5"): (3, 13),
    ("workstation", "ALE/Pong-v5"): (5, 18),
}
"""Minutes and mean return: laptop on two cores of Zen 3, one run of each Atari game; workstation
on 16 cores and an H100 or H200."""
_WHERE = {"laptop": "two cores", "workstation": "16 cores with a large GPU"}
_MILLION_FRAMES_AN_HOUR = 12, 36
"""Of an Atari game, acting and learning: on two cores of a Xeon at 2.5 GHz, and of Zen 5."""


def outlook(preset: str, env_id: str, minutes: float, atari: bool) -> str:
    """What to expect of a run of `minutes` (0: no limit), from measurements."""
    if seen := SEEN.get((preset, env_id)):
        reached, value = seen
        run = "this run ends early; one" if 0 < minutes < reached else "a run"
        return (
            f"What to expect: {run} on {_WHERE[preset]} had a mean return of {value:g} "
            f"after {reached:g} minutes."
        )
    if preset != "laptop":
        return "What to expect: not measured for this preset; the run shows its speed."
    if not atari:
        return "What to expect: this environment was not measured; small tasks take minutes."
    low, high = (f"{(minutes or 60) / 60 * each:,.1f}" for each in _MILLION_FRAMES_AN_HOUR)
    time = "" if minutes else " an hour"
    return (
        f"What to expect: {low} to {high} M frames{time} on two cores; this game was not measured."
    )


def choose(
    preset: str, task: Task, machine: Machine, part: str = "all", reason: str = "chosen"
) -> dict[str, Choice]:
    """A preset's values by setting name; `auto` becomes a named preset.

    What the hosts of a run must agree on does not depend on the machine.

    Args:
        preset: a name, or "auto".
        task: the environment's schema and kind.
        machine: this host.
        part: the part of a run on several hosts that runs here.
        reason: for the preset itself, unless it is "auto".

    Raises:
        ConfigError: no preset has this name.
    """
    RunConfig(preset=preset)  # type: ignore[arg-type]
    chosen: dict[str, Choice] = {}
    host = Host(machine, part)
    if preset == "auto" and part != "all":
        chosen["preset"] = Choice("workstation", "the same for all hosts of a run")
    elif preset == "auto":
        preset = "workstation" if machine.learns_on_gpu or machine.cores > 4 else "laptop"
        chosen["preset"] = Choice(preset, f"this machine has {machine}")
    else:
        chosen["preset"] = Choice(preset, reason)
    table = TABLE[chosen["preset"].value, "image" if task.image else "vector"]
    for name, (value, why) in table.items():
        chosen[name] = Choice(value(host) if callable(value) else value, why)
    if not (task.nature and task.any_loss):
        chosen.pop("quantiles", None)
    if not task.nature:
        chosen.pop("share_trunk", None)
        chosen.pop("layer_norm", None)
    if task.atari:
        chosen["reward_clip"] = Choice(True, "Atari scores differ a thousandfold between games")
    else:
        chosen["reward_clip"] = Choice(False, "clipping is customary for Atari")
    if chosen["preset"].value == "paper":
        return chosen
    if part in ("actor", "learner"):
        chosen.pop("capacity")  # the replay's host has it
    else:
        chosen |= _within_memory(task, host, chosen)
        if task.image and _frames_fit_on_gpu(task, host, chosen):
            chosen["replay_device"] = Choice("cuda", "a batch only names frames that the GPU has")
    return chosen


def _frames_fit_on_gpu(task: Task, host: Host, chosen: Mapping[str, Choice]) -> bool:
    """Whether the GPU of the learner, which is on the replay's host, has room for the replay."""
    machine, names = host.machine, ("actors", "envs_per_actor", "capacity")
    if host.part not in ("all", "replay with learner") or not machine.learns_on_gpu:
        return False
    settings = {name: chosen[name].value for name in names if name in chosen}
    needed = replay_bytes(task.schema, Config().replace(**settings, **_LEAST))
    return machine.gpu is not None and needed <= _GPU_SHARE * machine.gpu.memory_bytes


def _within_memory(task: Task, host: Host, chosen: Mapping[str, Choice]) -> dict[str, Choice]:
    """The preset's capacity, or what the memory share holds, and what follows from it.

    A transition must outlast two target networks:
    capacity >= 2 x batch x target period / samples per insert.
    """
    wanted, actors = chosen["capacity"], chosen["actors"].value
    free_bytes = host.machine.memory_bytes
    share = min(host.replay_share, max(free_bytes // 8, free_bytes - 6 * PROCESS_BYTES))
    settings = {name: chosen[name].value for name in ("actors", "envs_per_actor") if name in chosen}
    most = _capacity_in(share, task.schema, Config().replace(**settings, **_LEAST))
    if wanted.value <= most:
        return {"capacity": wanted}
    reason = f"{share / free_bytes:.0%} of {free_bytes / 2**30:.1f} GiB free memory"
    found = {"capacity": Choice(most, reason)}
    if actors > _MANY_ACTORS and task.image and most:
        batch = Config().learner.batch_size  # the preset changes only the other
        least = 2 * batch * chosen["target_period"].value / most
        found["samples_per_insert"] = Choice(
            max(_REUSE, math.ceil(least)),
            f"{actors} actors would replace these {most:,} faster than the target network changes",
        )
    return found


def replay_bytes(schema: Schema, config: Config) -> int:
    """Bytes of shared memory for the run's experience: slots, their headers, and the sum tree."""
    chunk = config.chunk_transitions
    slot_bytes = ChunkLayout(schema, chunk).body_bytes + 8 * HEADER_WORDS + 10 * chunk
    return config.slots * slot_bytes


def _capacity_in(share_bytes: int, schema: Schema, config: Config) -> int:
    """The largest round capacity whose replay fits in `share_bytes`; 0 if none does."""

    def fits(capacity: int) -> bool:
        try:
            smaller = config.replace(capacity=capacity, **_LEAST)
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
    """Raise ConfigError if the replay does not fit; it names a capacity that does.

    Huge pages are reserved and don't count as free memory; preflight checks them.
    """
    if config.replay.huge_pages:
        return
    needed = replay_bytes(schema, config)
    room = int(_MOST_MEMORY_SHARE * machine.memory_bytes)
    if needed <= room:
        return
    fitting = _capacity_in(room, schema, config)
    hint = f"--capacity {fitting} fits" if fitting >= 2 else "use fewer --actors"
    raise ConfigError(
        f"--capacity {config.replay.capacity:,} needs {needed / 2**30:.2f} GiB of shared memory, "
        f"and {room / 2**30:.2f} GiB are available ({_MOST_MEMORY_SHARE:.0%} of free memory): "
        f"{hint}"
    )
