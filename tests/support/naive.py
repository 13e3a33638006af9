"""Naive twins: the same results, written so simply that they are easy to verify."""

import bisect
import itertools
import math
from fractions import Fraction

import numpy as np


class NaiveLimiter:
    """The limiter as a log that is counted anew for every question, in exact fractions."""

    def __init__(self, samples_per_insert, min_size_to_sample, tolerance):
        self.ratio = Fraction(samples_per_insert)
        self.min_size_to_sample = min_size_to_sample
        self.tolerance = tolerance
        self.log = []

    def note(self, what, n):
        self.log.append((what, n))

    def _owed(self):
        """None until min_size_to_sample is committed; then what was granted and not yet sampled."""
        committed = out = 0
        owed = None
        for what, n in self.log:
            committed += n if what == "commit" else 0
            out += {"insert": n, "commit": -n, "refund": -n, "sample": 0}[what]
            if owed is None:
                owed = out * self.ratio if committed >= self.min_size_to_sample else None
            else:
                change = {"insert": self.ratio, "commit": 0, "refund": -self.ratio, "sample": -1}
                owed += change[what] * n
        return owed

    def can_insert(self, n):
        owed = self._owed()
        return owed is None or self.ratio == 0 or owed + n * self.ratio <= self.tolerance

    def can_sample(self, n):
        owed = self._owed()
        return owed is not None and (self.ratio == 0 or owed >= n)


class NaiveSumTree:
    """Priorities in a list; every answer is computed anew with exact sums."""

    def __init__(self, capacity):
        self.leaves = [0.0] * capacity

    def update(self, indices, priorities):
        for index, priority in zip(indices, priorities, strict=True):
            self.leaves[index] = priority

    @property
    def total(self):
        return math.fsum(self.leaves)

    @property
    def min_positive(self):
        return min((leaf for leaf in self.leaves if leaf > 0.0), default=math.inf)

    def find(self, prefix_sums):
        """For each value the smallest i whose cumulative sum exceeds it; else the last positive."""
        positive = [i for i, leaf in enumerate(self.leaves) if leaf > 0.0]
        sums = list(itertools.accumulate(Fraction(self.leaves[i]) for i in positive))
        ends = (bisect.bisect_right(sums, value) for value in prefix_sums)
        return [positive[min(end, len(positive) - 1)] for end in ends]


def double_dqn_td_errors(batch, q_online, q_target, q_online_next):
    """Target minus prediction, one transition at a time; the q's are lists of rows."""
    td_errors = []
    for i, action in enumerate(batch["action"]):
        row = list(q_online_next[i])
        best = row.index(max(row))
        target = batch["reward"][i] + batch["discount"][i] * q_target[i][best]
        td_errors.append(target - q_online[i][action])
    return td_errors


def quantile_row(predictions, targets):
    """The quantile Huber loss of one row, and its slope by each prediction; lists of floats."""
    loss, slopes, n = 0.0, [], len(predictions)
    for i, prediction in enumerate(predictions):
        middle, slope = (i + 0.5) / n, 0.0
        for target in targets:
            error = target - prediction
            share = abs(middle - (error < 0))
            huber = error**2 / 2 if abs(error) <= 1 else abs(error) - 0.5
            loss += share * huber / n**2
            slope -= share * max(-1.0, min(1.0, error)) / n**2
        slopes.append(slope)
    return loss, slopes


def centred_rmsprop(parameter, gradients, lr, decay, eps):
    """One number after steps along `gradients`."""
    mean = square = 0.0
    for gradient in gradients:
        mean = decay * mean + (1 - decay) * gradient
        square = decay * square + (1 - decay) * gradient**2
        parameter -= lr * gradient / (square - mean**2 + eps) ** 0.5
    return parameter


def adam(parameter, gradients, lr, eps, beta1=0.9, beta2=0.999, restart=1 << 60):
    """One number after steps along `gradients`, counted from 1 again after each `restart`."""
    mean = square = 0.0
    for number, gradient in enumerate(gradients):
        step = 1 + number % restart
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        parameter -= lr * (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)) ** 0.5 + eps)
    return parameter


class NaiveNStep:
    """One stream's n-step transitions, from whole observations kept in lists."""

    def __init__(self, n, gamma):
        self.n, self.gamma = n, gamma
        self.transitions = []
        self.steps = []  # (obs, step, reward, value) without a return yet
        self.obs = None

    def begin(self, obs):
        self.steps, self.obs, self.next_value = [], obs, 0.0

    def add(
        self, step, reward, next_obs, cut, end, value, next_value, given=None, exploratory=False
    ):
        while self.steps and exploratory:
            self._emit(self.obs, False, self.next_value)
        self.steps.append((self.obs, step, reward, value, given))
        while self.steps and (cut or end or len(self.steps) == self.n):
            self._emit(next_obs, cut, next_value)
        self.obs, self.next_value = next_obs, next_value

    def _emit(self, next_obs, cut, next_value):
        total = sum(self.gamma**k * s[2] for k, s in enumerate(self.steps))
        discount = 0.0 if cut else self.gamma ** len(self.steps)
        obs, first, _, first_value, priority = self.steps.pop(0)
        if priority is None:
            priority = abs(total + discount * next_value - first_value)
        self.transitions.append((obs, first, total, discount, next_obs, priority))


class NaiveRing:
    """The ring as a list of everything ever committed."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.committed = []
        self.released = 0

    def offer(self, rows):
        if len(self.committed) + len(rows) - self.released > self.capacity:
            return False
        self.committed += rows
        return True

    def poll(self, max_n):
        return self.committed[self.released : self.released + max_n]

    def release(self, n):
        self.released += n


class NaivePushes:
    """What a replay takes of one actor's pushes, each chunk by itself."""

    def __init__(self):
        self.incarnation = self.next = 0
        self.taken = []

    def push(self, incarnation, sequence, count, credit):
        for number in range(sequence, sequence + count):
            anew = incarnation > self.incarnation and number == 0
            follows = incarnation == self.incarnation and number == self.next
            if (anew or follows) and credit:
                credit -= 1
                self.incarnation, self.next = incarnation, number + 1
                self.taken.append((incarnation, number))


class NaiveMailbox:
    """The mailbox as the last value that was put in."""

    def __init__(self):
        self.version, self.value = 0, None

    def publish(self, version, value):
        self.version, self.value = version, value.copy()

    def newer_than(self, than_version):
        return (self.version, self.value) if self.version > than_version else (0, None)


class AtariGame:
    """Plain ALE, one frame at a time: no wrapper, no vector, no no-ops."""

    def __init__(self, spec, max_episode_frames):
        import ale_py
        from ale_py import roms

        self.ale = ale_py.ALEInterface()
        name = spec.env_id.removeprefix("ALE/").removesuffix("-v5")
        snake = "".join("_" + c.lower() if c.isupper() else c for c in name)[1:]
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(roms.get_rom_path(snake))
        full = spec.num_actions == 18
        self.actions = self.ale.getLegalActionSet() if full else self.ale.getMinimalActionSet()
        self.frames_per_step = spec.frames_per_step
        self.max_episode_frames = max_episode_frames
        self.begin()

    def begin(self):
        self.ale.reset_game()
        self.frames = 0

    def step(self, action):
        """(reward, game over, cut at the limit, life lost in a game that is not over)."""
        lives, reward = self.ale.lives(), 0.0
        for _ in range(self.frames_per_step):
            reward += self.ale.act(self.actions[action])
            self.frames += 1
            if self.ale.game_over() or self.frames >= self.max_episode_frames:
                break
        over = self.ale.game_over()
        cut = self.frames >= self.max_episode_frames and not over
        return reward, over, cut, self.ale.lives() < lives and not over


def grey(rgb):
    """Luminance of a screen (ITU-R BT.601), rounded."""
    return np.rint(rgb.astype(np.float64) @ (0.2989, 0.5870, 0.1140))


def downscaled(image, size=84):
    """Each pixel the mean of the area that it covers: cv2.INTER_AREA."""

    def weights(length):
        edges = np.arange(size + 1) * length / size
        starts, ends = edges[:-1, None], edges[1:, None]
        pixels = np.arange(length)
        covered = np.minimum(ends, pixels + 1) - np.maximum(starts, pixels)
        return np.clip(covered, 0.0, 1.0) * size / length

    return weights(image.shape[0]) @ image @ weights(image.shape[1]).T


class NaiveExchange:
    """Open questions and answers as dicts, each with the life of who asked."""

    def __init__(self):
        self.open, self.answers, self.life = {}, {}, {}

    def begin(self, place):
        self.life[place] = self.life.get(place, 0) + 1

    def ask(self, place, items):
        self.open[place] = (self.life[place], items.copy())

    def answer(self, judge, note):
        for place, (life, items) in self.open.items():
            self.answers[place] = (life, judge(items), note)
        self.open.clear()

    def take(self, place):
        life, values, note = self.answers.pop(place, (None, None, None))
        return (values, note) if life == self.life[place] else None
