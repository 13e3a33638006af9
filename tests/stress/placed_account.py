"""What became of every acknowledged transition of a run whose hosts are killed.

Everyone plays tests/stress/marked_env.py, so a transition says which game of which stream it is. An
actor's host keeps a chunk until the replay has acknowledged it, and a stream's transitions have no
gaps. So what is acknowledged can be read from the memory of the host alone, also when all of its
processes are dead: all that the stream has handed over, less what still lies there. Each of these
must be in a replay's memory, once, or have been in that of a shard that was killed.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from tests.stress.marked_env import check_row, game_of
from tests.support.fake_system import moment_of
from zapex.chunks.layout import (
    COMMITTED,
    COUNT,
    FREE,
    INCARNATION,
    LIVE,
    NO_FRAME,
    SEQUENCE,
    STATE,
)
from zapex.chunks.store import ChunkStore
from zapex.cli.flags import read_settings
from zapex.config.settings import Config
from zapex.envs.environments import check
from zapex.errors import ConfigError
from zapex.host.parts import PartName
from zapex.run.audit import attach
from zapex.run.run import Membership, Run
from zapex.shm_transport import HostMemory

Who = tuple[int, int]  # a stream's mark, and that of its life
ROLES: tuple[PartName, ...] = ("replay", "learner", "actor")
At = tuple[Who, int]  # a stream's transition, numbered from 0


class _Starts:
    """The number of the first transition of each episode of a stream."""

    def __init__(self, who: Who) -> None:
        self._who, self._starts = who, [0]

    def number(self, episode: int, step: int) -> int:
        while len(self._starts) <= episode:
            length = game_of(*self._who, len(self._starts) - 1).length
            self._starts.append(self._starts[-1] + length)
        return self._starts[episode] + step


@lru_cache(maxsize=4096)
def starts_of(who: Who) -> _Starts:
    """The episodes of a stream; they are known without its being played."""
    return _Starts(who)


def transitions_of(store: ChunkStore, slot: int, n_step: int, gamma: float) -> Iterator[At]:
    """Every transition of a slot's chunk. RuntimeError where one is not what was played."""
    frames = store.column(slot, "obs")
    now, then = (store.column(slot, f"{name}_frames")[:, 0] for name in ("obs", "next_obs"))
    reward, discount = store.column(slot, "reward"), store.column(slot, "discount")
    for row in range(int(store.header_rows[slot, COUNT])):
        if NO_FRAME in (now[row], then[row]):
            raise RuntimeError(f"torn: row {row} of slot {slot} names no observation")
        moment = check_row(
            frames[now[row]], float(reward[row]), float(discount[row]), frames[then[row]], n_step,
            gamma,
        )  # fmt: skip
        yield moment[:2], starts_of(moment[:2]).number(*moment[2:])


@dataclass
class HandedOver:
    """What an actor's host has handed over to its relay; `look` again and again, then `end`."""

    store: ChunkStore
    made: dict[Who, int] = field(default_factory=dict)  # transitions of a stream, at least

    def look(self) -> None:
        """Note how far each stream is."""
        for slot in range(self.store.slots):
            self._take(slot)

    def _take(self, slot: int) -> tuple[At, int] | None:
        """The first transition of a slot's whole chunk, and how many there are."""
        header = self.store.header_rows[slot]
        before = header.copy()
        if before[STATE] not in (FREE, COMMITTED, LIVE) or not before[COUNT]:
            return None
        frame = int(self.store.column(slot, "obs_frames")[0, 0]) % self.store.layout.frames
        obs = self.store.column(slot, "obs")[frame].copy()
        if (header[[INCARNATION, SEQUENCE, COUNT]] != before[[INCARNATION, SEQUENCE, COUNT]]).any():
            return None  # an actor has begun to write there
        stream, life, episode, step = moment_of(1, obs)
        who, count = (stream, life), int(before[COUNT])
        first = starts_of(who).number(episode, step)
        self.made[who] = max(self.made.get(who, 0), first + count)
        return (who, first), count

    def end(self) -> dict[Who, set[int]]:
        """All that was acknowledged; for a host whose processes are dead."""
        held: set[At] = set()
        for slot in range(self.store.slots):
            found = self._take(slot)
            if found is not None and self.store.state(slot) != FREE:
                (who, first), count = found
                held |= {(who, first + i) for i in range(count)}
        return {
            who: {n for n in range(made) if (who, n) not in held}
            for who, made in self.made.items()
        }  # fmt: skip


def memory_of(store: ChunkStore, n_step: int, gamma: float) -> Counter[At]:
    """How often each transition is in a replay's memory. RuntimeError: one is not whole."""
    states = store.header_rows[:, STATE]
    slots = [slot for slot in range(store.slots) if states[slot] in (COMMITTED, LIVE)]
    return Counter(at for slot in slots for at in transitions_of(store, slot, n_step, gamma))


def unaccounted(
    counted: int, acknowledged: dict[Who, set[int]], made: dict[Who, int], known: Iterable[At]
) -> int:
    """Acknowledged transitions of a host of actors that nobody has seen; counted: by its relay.

    Between two looks a stream's newest chunk may come, be acknowledged and be overwritten. Then its
    transitions are in a memory (known), and newer than those that were seen (made).
    """
    newer = sum(who in made and number >= made[who] for who, number in known)
    return max(0, counted - sum(map(len, acknowledged.values())) - newer)


def account(acknowledged: dict[Who, set[int]], there: Counter[At], gone: set[At]) -> dict[str, int]:
    """Where every acknowledged transition is.

    there: how often each is in a memory that lives. gone: those in the memory of a killed shard.
    lost: neither. doubled: how many too many there are.
    """
    asked = {(who, number) for who, numbers in acknowledged.items() for number in numbers}
    missing = [at for at in asked if not there[at]]
    return {
        "acknowledged": len(asked),
        "found_once": sum(there[at] == 1 for at in asked),
        "with_a_killed_shard": sum(at in gone for at in missing),
        "lost": sum(at not in gone for at in missing),
        "doubled": sum(there.values()) - len(there),
    }


@dataclass
class Life:
    """One life of a host's command, as its memory shows it; that stays when the life has ended."""

    role: PartName
    run_dir: Path
    link: Path  # of the memory, among the process's open files
    inode: int
    memory: HostMemory
    handed_over: HandedOver | None = None

    @property
    def alive(self) -> bool:
        """Whether the process has this memory."""
        try:
            return self.link.stat().st_ino == self.inode
        except OSError:
            return False

    def count(self, name: str) -> int:
        """A counter of the role that works here."""
        role = {"actor": "relay"}.get(self.role, self.role)
        return int(self.memory.metrics(role).snapshot(alive=False).get(name, 0))

    @property
    def progress(self) -> int:
        """Chunks acknowledged, transitions inserted or batches learned."""
        names = {"actor": "acknowledged", "replay": "inserted", "learner": "batches"}
        return self.count(names[self.role])


def life_at(run_dir: Path, role: PartName) -> Life | None:
    """The life that has a run directory now; None: nobody, or not with its memory yet."""
    try:
        pid = int((run_dir / ".lock").read_text())
        names = ((one, os.readlink(one)) for one in Path(f"/proc/{pid}/fd").iterdir())
        link = next((one for one, name in names if "memfd:zapex-control" in name), None)
        if link is None:
            return None
        inode = link.stat().st_ino
        config = Config().replace(**read_settings(str(run_dir / "config.toml")))
    except (OSError, ValueError, ConfigError):
        return None  # it is only just being made
    membership = Membership(role, "tcp://127.0.0.1:1")
    memory = attach(pid, Run(config, check(config.env.env), run_dir, membership=membership))
    if memory is None:
        return None
    handed_over = HandedOver(memory.store()) if role == "actor" else None
    return Life(role, run_dir, link, inode, memory, handed_over)


class Witness:
    """Finds every life of a run's hosts, and keeps what can be seen of it.

    run_dirs: role -> the directories in which lives of it may be now.
    """

    def __init__(
        self, run_dirs: Callable[[PartName], Iterable[Path]], n_step: int, gamma: float
    ) -> None:
        self._run_dirs, self._rule = run_dirs, (n_step, gamma)
        self.lives: list[Life] = []
        self.gone: set[At] = set()  # in the memory of replays that were killed

    def look(self) -> None:
        """Note new lives, and how far the streams of actors are."""
        for role in ROLES:
            for path in self._run_dirs(role):
                if not any(life.run_dir == path for life in self.living(role)):
                    life = life_at(path, role)
                    self.lives += [life] if life is not None else []
        for life in self.living("actor"):
            assert life.handed_over is not None
            life.handed_over.look()

    def living(self, role: PartName) -> list[Life]:
        """The lives of a role that have not ended."""
        return [life for life in self.lives if life.role == role and life.alive]

    def bury(self) -> None:
        """Keep what the memory of each dead replay held, and let the memory go."""
        dead = [life for life in self.lives if life.role == "replay" and not life.alive]
        for life in dead:
            self.gone |= set(memory_of(life.memory.store(), *self._rule))
            self.lives.remove(life)

    def settle(self) -> dict[str, int]:
        """The account. All hosts of actors have ended; the replays live."""
        self.bury()
        there: Counter[At] = Counter()
        for life in self.living("replay"):
            there.update(memory_of(life.memory.store(), *self._rule))
        known = there.keys() | self.gone
        acknowledged: dict[Who, set[int]] = {}
        unseen = 0
        for life in self.lives:
            if (handed_over := life.handed_over) is not None:
                found = handed_over.end()
                acknowledged |= found
                unseen += unaccounted(life.count("transitions"), found, handed_over.made, known)
        found_here = account(acknowledged, there, self.gone)
        return {**found_here, "acknowledged_unseen": unseen, "streams": len(acknowledged)}
