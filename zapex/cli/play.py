"""`zapex eval`, and the game of `zapex watch --game`: whole games with a run's saved network."""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from zapex.cli.flags import check_output, parse, read_settings
from zapex.cli.resolve import check_trust
from zapex.config.fields import SettingsGroup, setting
from zapex.config.settings import Config
from zapex.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from zapex.envs.environments import EnvironmentSpec
    from zapex.roles.evaluator import Spectator

_PROGRESS_S = 10.0


@dataclass(frozen=True)
class _EvalOptions(SettingsGroup):
    """Options."""

    run: str = ""
    """Directory of the run, or its name in runs/."""
    episodes: int = setting(10, low=1)
    """Episodes to play."""
    checkpoint: str = "best"
    """Checkpoint to evaluate: best, latest, the name of one of the run's, or a file."""
    video: str = ""
    """Record the episodes to this .mp4, one after the other."""
    terminal: bool = False
    """Draw the episodes on the terminal as they are played, with the Q value of each action."""
    render: bool = False
    """Show the episodes in a window as they are played; needs a display."""
    json: str = ""
    """Write the returns to this file."""
    seed: int = setting(1, low=0, high=2**63 - 1)
    """Random seed."""
    epsilon: float | None = setting(None, low=0.0, high=1.0)
    """Share of random actions; default: the run's --eval-epsilon."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the network."""
    env: str = ""
    """The run's environment, to confirm a module:Id or module:callable instead of giving
    --trust."""
    trust: bool = False
    """Allow the modules that the run names."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.terminal and self.render:
            raise ConfigError("--terminal and --render show the same episodes: give one of them")
        check_output("--video", self.video, ".mp4")
        check_output("--json", self.json)


@dataclass(frozen=True)
class Stored:
    """A saved run's settings and environment, once the user trusts it."""

    run_dir: Path
    config: Config
    spec: "EnvironmentSpec"

    @classmethod
    def of(cls, run_dir: Path, env: str, trust: bool, device: str) -> Self:
        """The run of a directory. Raises ConfigError if the user does not trust its modules."""
        path = str(run_dir / "config.toml")
        settings = read_settings(path) | {"device": device}
        config = Config().replace(**settings)
        if env not in ("", config.env.env):
            raise ConfigError(f"--env is {env!r}, but {run_dir} plays {config.env.env!r}")
        check_trust(path, settings, {"env": env} if env else {}, trust)
        from zapex.envs import environments

        played = config.env
        spec = environments.check(played.env, played.env_kwargs, played.wrapper)
        return cls(run_dir, config, spec)

    @property
    def aspect(self) -> float:
        """Width by height of the screen (Atari pixels are not square); 0: as the pixels are."""
        return 4 / 3 if self.spec.atari else 0.0


def command(args: list[str]) -> int:
    """`zapex eval RUN`: play, show or record episodes, and print the mean return."""
    what = "Evaluate a run's saved network: play whole episodes and print the mean return."
    options = parse(_EvalOptions(), args, "eval", what, "run")
    from zapex.watch.runs import find

    run = Stored.of(find(options.run), options.env, options.trust, options.device)
    config, spec = run.config, run.spec
    epsilon = config.evaluator.eval_epsilon if options.epsilon is None else options.epsilon
    from zapex.roles import evaluator
    from zapex.run import checkpoints

    if not options.render:
        draw_without_a_window()
    saved = checkpoints.find(run.run_dir, options.checkpoint)
    with _spectator(options, run) as spectator:
        policy = checkpoints.load_network(checkpoints.load(saved), spec, config.learner)
        if spectator is None:
            print(spec.describe, *spec.notes, f"checkpoint {saved}", sep="\n", flush=True)
        result = evaluator.evaluate(
            policy.q_values,
            spec,
            options.episodes,
            seed=options.seed,
            epsilon=epsilon,
            noop_max=config.evaluator.eval_noop_max,
            video=options.video or None,
            num_threads=len(os.sched_getaffinity(0)),
            spectator=spectator,
            progress=_progress(options.episodes) if spectator is None else None,
        )
    if not result.returns:
        print("the window was closed before an episode ended")
        return 0
    if options.json:
        facts = {"env": spec.env_id, "checkpoint": str(saved), "seed": options.seed}
        text = json.dumps({**facts, "epsilon": epsilon, **result.describe()}, indent=2)
        Path(options.json).write_text(text + "\n")
    if options.video:
        print(f"video {options.video}")
    print(f"mean {result.mean:g}  (std {result.std:.3g}, {len(result.returns)} episodes)")
    return 0


def draw_without_a_window() -> None:
    """Let pygame, which draws some screens, do so without a window or sound."""
    for name in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
        os.environ.setdefault(name, "dummy")


@contextmanager
def _spectator(options: _EvalOptions, run: Stored) -> "Iterator[Spectator | None]":
    """What shows the episodes, if anything."""
    from zapex.watch.game import TerminalGame, Window

    title = run.spec.env_id
    if options.terminal:
        with TerminalGame(title, run.aspect) as game:
            yield game
    elif options.render:
        with Window(title, run.aspect) as window:
            yield window
    else:
        yield None


def _progress(episodes: int) -> Callable[[int], None]:
    """Prints to stderr, every ten seconds, how many episodes have ended."""
    due_s = time.monotonic() + _PROGRESS_S

    def report(ended: int) -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + _PROGRESS_S
            print(f"{ended} of {episodes} episodes played", file=sys.stderr, flush=True)

    return report


def play_newest(run_dir: Path, env: str, trust: bool) -> None:
    """Draw episodes on the terminal until Ctrl-C, each with the run's newest saved network.

    Raises:
        ConfigError: there is no terminal.
        CheckpointError: the run has saved nothing yet.
    """
    run = Stored.of(run_dir, env, trust, "cpu")
    from zapex.roles import evaluator
    from zapex.run import checkpoints
    from zapex.watch.game import TerminalGame

    draw_without_a_window()
    evaluation = run.config.evaluator
    hint = "Ctrl-C ends this view; the run continues"
    with TerminalGame(run.spec.env_id, run.aspect, hint=hint) as game:
        for seed in itertools.count(1):
            saved = _newest(run_dir)
            policy = checkpoints.load_network(checkpoints.load(saved), run.spec, run.config.learner)
            game.title = f"{run.spec.env_id}  {saved.stem}"
            evaluator.evaluate(
                policy.q_values,
                run.spec,
                1,
                seed=seed,
                epsilon=evaluation.eval_epsilon,
                noop_max=evaluation.eval_noop_max,
                spectator=game,
            )


def _newest(run_dir: Path) -> Path:
    """The checkpoint that was written last, which may be the best network's."""
    from zapex.run import checkpoints

    found = [path for path in (checkpoints.latest(run_dir), checkpoints.best(run_dir)) if path]
    if not found:
        raise CheckpointError(
            f"{run_dir} has not saved a network yet: it does so after its first evaluation "
            "(--eval-period-s), every --checkpoint-minutes, and at its end"
        )
    return max(found, key=lambda path: path.stat().st_mtime)
