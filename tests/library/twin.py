"""A differential twin of the whole replay: random schemas, random calls, every row compared.

    python -m tests.library.twin --minutes 60 --seed 1

A play is one replay with a random schema and some hundred random calls, made by its owner, by
clients of its handle, or by clients of its URL: steps under each autoreset mode, resets anywhere,
whole transitions, updates, snapshots. The twin keeps each transition as plain arrays. What the
replay gives back must be the twin's newest transitions, each once, with every column, return,
discount and weight. A difference ends the program with the seed and the place of its play.
"""

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

import zapex
from benchmarks.support.harness import add_json, evidence
from benchmarks.support.machine import Watch
from tests.support.naive import NaiveNStep
from zapex import Column, PrioritizedReplay, Schema
from zapex.chunks.batch import aligned_zeros
from zapex.library.url_server import LibraryConfig, make_server

PLACES = ("owner", "handle", "url")
MODES = ("next_step", "same_step", "disabled")
DEADLINE_S = 60.0


DTYPES = ("u1", "i1", "i2", "i8", "u4", "f2", "f4", "f8", "?", ">i2", "c8")
NUMBER = "row"  # an extra column that every schema has: which transition this is


def random_column(rng, stack=1):
    shape = tuple(rng.integers(1, 4, rng.integers(0, 3)).tolist())
    return Column(shape, DTYPES[rng.integers(len(DTYPES))], stack, int(rng.integers(-1, 1)))


def random_schema(rng, n_step=None):
    """One observation column or several, an action, some extra columns; and NUMBER."""
    names = rng.permutation(["right", "left", "up", "a"])[: rng.integers(1, 4)]
    columns = {f"obs/{name}": random_column(rng, int(rng.integers(1, 5))) for name in names}
    if rng.random() < 0.4:
        columns = {"obs": random_column(rng, int(rng.integers(1, 5)))}
    columns["action"] = random_column(rng)
    for name in rng.permutation(["a_mask", "mask", "zeta"])[: rng.integers(0, 4)]:
        columns[str(name)] = random_column(rng)
    columns[NUMBER] = Column((), np.int64)
    order = rng.permutation(list(columns)).tolist()
    n_step = n_step or int(rng.integers(1, 6))
    return Schema({name: columns[name] for name in order}, n_step, gamma=0.9)


def shuffled(rng, schema):
    """The same columns in another order."""
    order = rng.permutation(list(schema.columns)).tolist()
    columns = {name: schema.columns[name] for name in order}
    return Schema(columns, schema.n_step, schema.gamma)


def values(rng, column, shape):
    """Random values of a column; all of them equal themselves."""
    return rng.integers(0, 100, shape).astype(column.dtype)


def as_given(columns):
    """Observation columns as a user gives them: an array, or a dict by name."""
    if "obs" in columns:
        return columns["obs"]
    return {name.removeprefix("obs/"): array for name, array in columns.items()}


def steps_of(rng, schema, rows, first):
    """Actions and extra columns of `rows` transitions, numbered from `first`."""
    steps = {n: values(rng, c, (rows, *c.shape)) for n, c in schema.step_columns.items()}
    return {**steps, NUMBER: np.arange(first, first + rows)}


class Game:
    """Streams of random observations, stacked as the schema says."""

    def __init__(self, rng, schema, streams):
        self.rng, self.columns = rng, schema.obs_columns
        self.stacks = [{} for _ in range(streams)]
        for i in range(streams):
            self.reset(i)

    def _frame(self):
        blank = self.rng.random() < 0.05
        return {
            name: np.zeros(c.shape, c.dtype) if blank else values(self.rng, c, c.shape)
            for name, c in self.columns.items()
        }

    def reset(self, i):
        padding = ("zero", "repeat", "distinct")[self.rng.integers(3)]
        last = self._frame()
        for name, c in self.columns.items():
            first = {"zero": np.zeros(c.shape, c.dtype), "repeat": last[name]}.get(padding)
            before = [values(self.rng, c, c.shape) if first is None else first] * (c.stack - 1)
            self.stacks[i][name] = [*before, last[name]]

    def step(self, i):
        for name, frame in self._frame().items():
            self.stacks[i][name] = [*self.stacks[i][name][1:], frame]

    def seen(self):
        """All streams' observations, by column."""
        return {
            name: np.stack([
                stacks[name][0] if c.stack == 1 else np.stack(stacks[name], axis=c.stack_axis)
                for stacks in self.stacks
            ])
            for name, c in self.columns.items()
        }  # fmt: skip


class Twin:
    """Every transition that the replay was given and may still hold."""

    def __init__(self, schema, alpha, eps, capacity):
        self.schema, self.alpha, self.eps, self.capacity = schema, alpha, eps, capacity
        self.rows = {}  # by number: columns, return, discount
        self.leaves = {}
        self.sources = defaultdict(list)  # numbers in the order in which a stream completed them
        self.given = []  # by row since the memory was full last: its leaf, or 0 if not given
        self.last, self.raised = (1.0 + eps) ** alpha, 0.0
        self.next, self.gone = 0, 0

    def add(self, source, number, columns, reward, discount, leaf):
        self.rows[number] = columns, reward, discount
        self.leaves[number] = leaf
        self.sources[source].append(number)

    def leaf(self, priority):
        """Of a new transition; None: no priority is given."""
        since = max(self.given, default=0.0)
        leaf = max(self.last, since, self.raised)
        given = 0.0
        if priority is not None:
            leaf = given = (abs(priority) + self.eps) ** self.alpha
        self.given.append(given)
        since = max(since, given, self.raised)
        if len(self.given) >= self.capacity and since > 0.0:
            self.given, self.last, self.raised = [], since, 0.0
        return leaf

    def update(self, number, priority):
        leaf = self.leaves[number] = (abs(priority) + self.eps) ** self.alpha
        self.raised = max(self.raised, leaf)

    def check(self, replay):
        """All that can be drawn is here, and nothing but the oldest of each stream is missing."""
        stats = replay.stats()
        count = len(replay)
        numbers = np.empty(0, np.int64)
        if count:
            batch = replay.sample(count, 0.7, method="without_replacement")
            numbers = batch[NUMBER]
            assert len(set(numbers.tolist())) == count, "a transition is there twice"
            self._compare(batch, numbers.tolist())
        there, gone = set(numbers.tolist()), 0
        for listed in self.sources.values():
            kept = [number for number in listed if number in there]
            missing = listed[: len(listed) - len(kept)]
            assert kept == listed[len(missing) :], "a newer transition went before an older one"
            for number in missing:
                del self.rows[number], self.leaves[number]
            gone += len(missing)
            listed[:] = kept
        assert there == self.rows.keys(), "a transition came from nowhere"
        if gone:
            chunk, capacity = stats["chunk"], stats["capacity"]
            full = stats["slots_live"] >= -(-capacity // chunk) - 1
            assert count > capacity - chunk or full, f"{gone} transitions went without a reason"
        self.gone += gone

    def _compare(self, batch, numbers):
        rows = [self.rows[number] for number in numbers]
        for name in (*self.schema.obs_columns, *self.schema.step_columns):
            root, _, key = name.partition("/")
            for side in ("obs", "next_obs") if root == "obs" else (name,):
                found = batch[side][key] if key else batch[side]
                wanted = np.stack([columns[side, name] for columns, _, _ in rows])
                np.testing.assert_array_equal(found, wanted, err_msg=f"{side} {name}")
        np.testing.assert_allclose(batch.reward, [r for _, r, _ in rows], rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(batch.discount, [d for _, _, d in rows], rtol=1e-5)
        leaves = np.array([self.leaves[number] for number in numbers])
        np.testing.assert_allclose(batch.weights, (leaves / leaves.min()) ** -0.7, rtol=1e-4)


class Player:
    """A writer, its environments, and their naive n-step returns."""

    def __init__(self, play, replay, name, streams):
        self.play, self.name, self.streams = play, name, streams
        rng = self.rng = play.rng
        self.mode = MODES[rng.integers(3)]
        self.given = play.gives or rng.random() < 0.7
        self.writer = replay.writer(streams, self.mode)
        self.game = Game(rng, play.schema, streams)
        self.over = np.ones(streams, bool)
        self.twins = [NaiveNStep(play.schema.n_step, play.schema.gamma) for _ in range(streams)]
        self.end = float(rng.choice([0.02, 0.3]))
        self.reset(self.over)

    def _row(self, i, seen):
        return {name: array[i].copy() for name, array in seen.items()}

    def reset(self, mask):
        begun = np.flatnonzero(mask)
        for i in begun:
            self.game.reset(i)
        seen = self.game.seen()
        self.writer.reset(as_given(seen), mask)
        self.over[begun] = False
        for i in begun:
            self.twins[i].begin(self._row(i, seen))

    def step(self):
        rng, streams, game = self.rng, self.streams, self.game
        if self.mode == "disabled" and self.over.any():
            self.reset(self.over.copy())
        begun = self.over.copy()  # only under next_step is any stream over here
        for i in range(streams):
            game.reset(i) if begun[i] else game.step(i)
        reward = np.where(begun, 0.0, rng.integers(-3, 4, streams))
        terminated, truncated = (~begun & (rng.random(streams) < self.end) for _ in range(2))
        cut = rng.random(streams) < 0.05
        exploratory = rng.random(streams) < 0.2
        if rng.random() < 0.5:
            exploratory[:] = False
        self.over = terminated | truncated
        last, final = game.seen(), None
        if self.mode == "same_step" and self.over.any():
            final = as_given(last)
            if isinstance(final, np.ndarray) and rng.random() < 0.5:  # as Gymnasium gives it
                final = np.full(streams, None, object)
                for i in np.flatnonzero(self.over):
                    final[i] = as_given(last)[i]
            for i in np.flatnonzero(self.over):
                game.reset(i)
        seen = game.seen()
        steps = steps_of(rng, self.play.schema, streams, self.play.twin.next)
        self.play.twin.next += streams
        priority = 0.1 + rng.random(streams)
        self.writer.add(
            reward=reward, next_obs=as_given(seen), terminated=terminated, truncated=truncated,
            cut=cut if rng.random() < 0.5 or cut.any() else None, final_obs=final,
            exploratory=exploratory if exploratory.any() else None,
            priority=-priority if self.given else None, **steps,
        )  # fmt: skip
        for i, twin in enumerate(self.twins):
            if begun[i]:
                twin.begin(self._row(i, seen))
                continue
            step = {name: array[i] for name, array in steps.items()}, priority[i]
            twin.add(
                step, reward[i], self._row(i, last), bool(terminated[i] or cut[i]),
                bool(self.over[i]), 0.0, 0.0, exploratory=exploratory[i],
            )  # fmt: skip
            if self.over[i] and self.mode == "same_step":
                twin.begin(self._row(i, seen))
        if self.mode == "same_step":
            self.over[:] = False
        self._complete()

    def _complete(self):
        if self.play.owner is not None:
            len(self.play.owner)  # takes in what clients told: the largest priority has an order
        memory = self.play.twin
        for i, twin in enumerate(self.twins):
            for obs, (step, priority), reward, discount, next_obs, _ in twin.transitions:
                columns = {**{("obs", n): a for n, a in obs.items()},
                           **{("next_obs", n): a for n, a in next_obs.items()},
                           **{(n, n): a for n, a in step.items()}}  # fmt: skip
                leaf = memory.leaf(priority if self.given else None)
                source = f"{self.name} stream {i}"
                memory.add(source, int(step[NUMBER]), columns, reward, discount, leaf)
            twin.transitions.clear()


class Play:
    """One replay of a random schema, and random calls."""

    def __init__(self, seed, place, folder):
        self.rng = rng = np.random.default_rng(seed)
        self.place, self.folder = place, folder
        self.schema = schema = random_schema(rng)
        alpha, eps = float(rng.choice([0.0, 0.6, 1.0])), float(rng.choice([1e-6, 0.1]))
        # Rows of clients come slot by slot. So the largest recent priority is known row by row only
        # to the owner; the others always give priorities.
        self.gives = place != "owner"
        self.players, self.clients = [], []
        self.opened, self.names = contextlib.ExitStack(), 0
        shortest = max(schema.n_step, schema.stack)
        if place == "url":
            capacity = 32 * shortest + int(rng.integers(0, 200))
            self.service = self.opened.enter_context(Service(schema, capacity, alpha, eps, folder))
            self.owner = None
        else:
            chunk = shortest + int(rng.integers(0, 8))
            capacity = 2 * 8 * chunk + int(rng.integers(0, 200))
            self.owner = PrioritizedReplay(
                capacity, shuffled(rng, schema), alpha, eps, int(rng.integers(1 << 30)),
                chunk=chunk, streams=4,
            )  # fmt: skip
        self.twin = Twin(schema, alpha, eps, capacity)
        self.connect()

    def connect(self):
        """New users of the replay."""
        self.users = [self.owner] if self.owner is not None else []
        if self.place != "owner":
            for _ in range(2):
                if self.place == "url":
                    user = zapex.connect(
                        self.service.url, schema=shuffled(self.rng, self.schema),
                        timeout_s=DEADLINE_S, prefetch=0,
                    )  # fmt: skip
                else:
                    user = zapex.connect(self.owner.handle, timeout_s=DEADLINE_S)
                self.clients.append(user)
            self.users += self.clients
        self.player()

    def any_user(self):
        return self.users[self.rng.integers(len(self.users))]

    def player(self):
        if len(self.players) < 2:
            self.names += 1
            streams = int(self.rng.integers(1, 3))
            self.players.append(Player(self, self.any_user(), f"writer {self.names}", streams))

    def leave(self):
        if self.players:
            self.players.pop(self.rng.integers(len(self.players))).writer.close()

    def step(self):
        for _ in range(self.rng.integers(1, 30)):
            for player in self.players:
                player.step()
                if self.place == "url":  # what is not closed is not sent
                    player.writer.flush()

    def reset(self):
        """Resets before n steps, which once filled a chunk with frames and no row."""
        for player in self.players:
            for _ in range(self.rng.integers(1, 12)):
                player.reset(self.rng.random(player.streams) < 0.8)
                for _ in range(self.rng.integers(0, self.schema.n_step)):
                    player.step()
            player.writer.flush()

    def flush(self):
        for player in self.players:
            player.writer.flush()

    def extend(self):
        """Successive or unrelated transitions, by some user."""
        rng, schema, twin = self.rng, self.schema, self.twin
        user, n = self.any_user(), schema.n_step
        count = int(rng.integers(1, 2 * user.stats()["chunk"]))
        game = Game(rng, schema, 1)
        seen = []
        for _ in range(count + n):
            seen.append({name: array[0] for name, array in game.seen().items()})
            game.step(0) if rng.random() < 0.9 else game.reset(0)
        order = rng.permutation(count) if rng.random() < 0.3 else np.arange(count)
        obs, next_obs = (
            {name: np.stack([seen[i + ahead][name] for i in order]) for name in schema.obs_columns}
            for ahead in (0, n)
        )
        steps = steps_of(rng, schema, count, twin.next)
        twin.next += count
        reward = rng.normal(size=count).astype(np.float32)
        terminated = rng.random(count) < 0.2
        follows = rng.random(count).astype(np.float32) if rng.random() < 0.3 else None
        gives = rng.random() < 0.6 or self.gives
        priorities = 0.1 + rng.random(count) if gives else None
        user.extend(
            obs=as_given(obs), next_obs=as_given(next_obs), reward=reward, terminated=terminated,
            discount=follows, priorities=priorities, **steps,
        )  # fmt: skip
        discount = np.where(terminated, 0.0, schema.gamma**n if follows is None else follows)
        name = f"extend of {self.users.index(user)}, {id(user)}"
        for k in range(count):
            columns = {("obs", c): a[k] for c, a in obs.items()}
            columns |= {("next_obs", c): a[k] for c, a in next_obs.items()}
            columns |= {(c, c): a[k] for c, a in steps.items()}
            leaf = twin.leaf(None if priorities is None else priorities[k])
            twin.add(name, int(steps[NUMBER][k]), columns, reward[k], discount[k], leaf)

    def update(self):
        """New priorities, of some transitions twice; the last one counts."""
        user, twin = self.any_user(), self.twin
        if not len(user):
            return
        batch = user.sample(int(self.rng.integers(1, len(user) + 1)), method="independent")
        priorities = 0.1 + 3 * self.rng.random(len(batch.keys))
        applied, stale = user.update_priorities(batch.keys, -priorities)
        assert (applied, stale) == (len(batch.keys), 0)
        for number, priority in zip(batch[NUMBER].tolist(), priorities, strict=True):
            twin.update(number, priority)

    def snapshot(self):
        """A save, and the restored replay beside or in place of the present one."""
        if self.owner is None:
            return
        self.twin.check(self.owner)
        self.owner.save(self.folder / "snapshot")
        loaded = PrioritizedReplay.load(self.folder / "snapshot")
        assert len(loaded) == len(self.owner)
        self.twin.check(loaded)
        if len(loaded):
            keys = self.owner.sample(4, method="independent").keys if len(loaded) >= 4 else []
            assert loaded.update_priorities(keys, np.ones(len(keys))) == (0, len(keys))
        if self.rng.random() < 0.5:
            self.disconnect()
            self.owner = loaded
            self.connect()

    def disconnect(self):
        for player in self.players:
            player.writer.close()
        for client in self.clients:
            client.close()
        self.players, self.clients = [], []
        if self.owner is not None:
            self.owner.close()

    def run(self, calls):
        """Returns how many transitions were made."""
        made = [self.step, self.step, self.reset, self.flush, self.extend, self.extend]
        made += [self.update, self.update, self.snapshot, self.leave, self.player]
        try:
            for _ in range(calls):
                made[self.rng.integers(len(made))]()
                self.twin.check(self.any_user())
        finally:
            with self.opened:
                self.disconnect()
        return self.twin.next


class Service:
    """A replay served by URL, from a thread of this process."""

    def __init__(self, schema, capacity, alpha, eps, folder):
        config = LibraryConfig(
            schema.to_json(), f"ipc://{folder}/replay", capacity, alpha, eps, writers=4
        )
        self._library = make_server(config, aligned_zeros(config.nbytes), time.time_ns())
        self.url = self._library.server.url
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        while not self._stopping:
            if not self._library.do_work():
                self._library.wait(self._library.ready)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopping = True
        self._thread.join(DEADLINE_S)
        self._library.close()


def play(seed, place, calls):
    """One play in a folder of its own. Returns how many transitions were made."""
    with tempfile.TemporaryDirectory(prefix="zapex-twin-") as folder:
        return Play(seed, place, Path(folder)).run(calls)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=150, help="in each play")
    parser.add_argument("--place", choices=PLACES, help="only this one")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    places = (chosen.place,) if chosen.place else PLACES
    watch, deadline_s = Watch(), time.monotonic() + 60 * chosen.minutes
    plays = dict.fromkeys(places, 0)
    seed, rows = chosen.seed, 0
    while time.monotonic() < deadline_s:
        place = places[(seed - chosen.seed) % len(places)]
        try:
            rows += play(seed, place, chosen.calls)
        except BaseException:
            print(f"the play of seed {seed} at place {place} differs", file=sys.stderr, flush=True)
            raise
        plays[place], seed = plays[place] + 1, seed + 1
    print(f"{sum(plays.values())} plays, {rows:,} transitions, 0 differences", flush=True)
    if chosen.json:
        result = {"seed": chosen.seed, "plays": plays, "transitions": rows, "differences": 0}
        add_json(chosen.json, "hostile", "twin", result, evidence(watch, None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
