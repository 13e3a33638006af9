"""`zapex.train`: `zapex train` for Python programs and notebooks."""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import numpy as np

from zapex.cli.flags import ALIASES, flags_of
from zapex.cli.resolve import Options, prepared, settled
from zapex.config.fields import flag_of, parse_count
from zapex.config.settings import FIELDS, SECTIONS, Config, merged
from zapex.config.words import did_you_mean
from zapex.errors import ConfigError, ZapexError
from zapex.machine import named
from zapex.watch.report import Report, Result

if TYPE_CHECKING:
    from zapex.config.settings import (
        ActorConfig,
        EnvConfig,
        EvaluatorConfig,
        LearnerConfig,
        ReplayConfig,
        RunConfig,
    )

_OPTIONS = flags_of(Options)
_KINDS = {**flags_of(*SECTIONS.values()), **_OPTIONS}
NO_MAIN_GUARD = (
    "zapex.train was called while a run imports this module, and would start another run in each "
    'of its processes: put the call under `if __name__ == "__main__":`'
)


Code = str | Callable[..., Any]
"""module:name, or the class or function itself."""
Count = int | float | str
"""A whole number; also 2e5 or "200k"."""
Text = str | os.PathLike[str]


class Settings(TypedDict, total=False):
    """What TrainConfig takes: the settings of zapex/config/settings.py, and options."""

    env: Code
    env_kwargs: dict[str, Any]
    wrapper: Code | Sequence[Code]
    max_episode_frames: Count
    reward_clip: bool
    actors: Count
    envs_per_actor: Count
    param_period: Count
    eps_base: float
    eps_alpha: float
    exploration: Literal["ladder", "linear"]
    eps_end: float
    exploration_frames: Count
    max_chunk_age_steps: Count
    env_threads: Count
    actor_threads: Count
    inference: Literal["cpu", "gpu", "central"]
    inference_device: Literal["auto", "cpu", "cuda"]
    actor_precision: Literal["auto", "float32", "bfloat16"]
    capacity: Count
    alpha: float
    beta: float
    initial_priority: Literal["actor", "max"]
    priority_eps: float
    priority_floor: float
    recency: float
    n_step: Count
    gamma: float
    cut_exploratory: bool
    learning_starts: Count
    samples_per_insert: float
    samples_per_insert_tolerance: Count
    sampling: Literal["stratified", "independent"]
    prefetch: Count
    save_replay: Literal["never", "stop", "always"]
    huge_pages: bool
    batch_size: Count
    lr: float
    optimiser: Literal["rmsprop", "adam", "adam-rel"]
    rmsprop_decay: float
    optimiser_eps: float
    max_grad_norm: float
    target_period: Count
    average_targets: Count
    publish_period_s: float
    hidden: Count
    channels: Count
    network: Code
    dueling: bool
    layer_norm: bool
    max_pool: Count
    quantiles: Count
    double: bool
    munchausen: bool
    share_trunk: bool
    loss: Code
    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["auto", "float32", "bfloat16"]
    learner_threads: Count
    gather_threads: Count | None
    replay_device: Literal["cpu", "cuda", "cpu-tensor"]
    cuda_graphs: bool
    eval_period_s: float
    eval_episodes: Count
    eval_epsilon: float
    eval_noop_max: Count
    preset: Literal["auto", "paper", "workstation", "laptop", "smoke"]
    seed: Count
    exp: str
    run_dir: Text
    resume: Text
    max_frames: Count
    max_minutes: float
    stop_at_return: float | None
    checkpoint_minutes: float
    numa: Literal["off", "interleave", "gpu"]
    inline: bool
    plain: bool
    quiet: bool
    track: bool
    wandb_project_name: str
    wandb_entity: str
    visdom: str
    config: Text
    total_timesteps: Count
    trust: bool
    more_minutes: float
    more_frames: Count


if TYPE_CHECKING:

    class _Readable(
        EnvConfig, ActorConfig, ReplayConfig, LearnerConfig, EvaluatorConfig, RunConfig, Options
    ):
        """The settings as they are read."""
else:
    _Readable = object


class TrainConfig(_Readable):
    """The settings of a run, named as the flags: `TrainConfig(env="CartPole-v1", lr=1e-3)`.

    Other settings come from `config` (a file) or `preset`, as on the command line. `env`,
    `network`, `loss` and `wrapper` take text, as their flags do, or a class or function.

    A setting is also an attribute. One that was not given is what a run on this machine would use;
    to read it examines the environment, so it raises what `train` does.

    Attributes:
        given: the settings that were given, as the flags have them.

    Raises:
        ConfigError: no setting has this name (with the nearest one), or a value cannot work.
    """

    def __init__(self, **settings: Unpack[Settings]) -> None:
        given: dict[str, Any] = {}
        inline = bool(settings.get("inline"))
        for name, value in settings.items():
            known = ALIASES.get(name, name)
            if known not in _KINDS:
                raise ConfigError(f"TrainConfig has no setting {name!r}{_nearest(known)}")
            given[known] = _as_flag(known, value, inline)
        self.given = given
        merged(vars(Config()), {name: value for name, value in given.items() if name in FIELDS})
        self._options()

    def __repr__(self) -> str:
        return f"TrainConfig({', '.join(f'{k}={v!r}' for k, v in self.given.items())})"

    if not TYPE_CHECKING:  # type checkers know the settings

        def __getattr__(self, name: str) -> Any:
            name, given = ALIASES.get(name, name), self.__dict__.get("given", {})
            if name in given:
                return given[name]
            if name in FIELDS:
                return getattr(getattr(self._settled, FIELDS[name][0]), name)
            if name in _KINDS:
                return getattr(self._options(), name)
            raise AttributeError(f"TrainConfig has no setting {name!r}{_nearest(name)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_KINDS]

    def replace(self, **changes: Unpack[Settings]) -> "TrainConfig":
        """The same settings with some changed. Raises ConfigError, as the class does."""
        return TrainConfig(**{**self.given, **changes})

    def _options(self) -> Options:
        return Options(**{name: self.given[name] for name in _OPTIONS if name in self.given})

    @cached_property
    def _settled(self) -> Config:
        given = {name: value for name, value in self.given.items() if name in FIELDS}
        return settled(given, self._options()).config


def _nearest(name: str) -> str:
    return did_you_mean(name, _KINDS)


def _as_flag(name: str, value: Any, inline: bool) -> Any:
    """The value of a setting as its flag has it: counts as int, paths and code as text."""
    if name == "wrapper" and not isinstance(value, (list, tuple)):
        value = [value]
    if isinstance(value, (list, tuple)):
        return [_path(flag_of(name), each, inline) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if int in _KINDS[name] and not isinstance(value, bool):
        if isinstance(value, str):
            return parse_count(value)
        if isinstance(value, float) and value.is_integer():
            return int(value)
    return (
        os.fspath(value) if isinstance(value, os.PathLike) else _path(flag_of(name), value, inline)
    )


TrainConfig.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
        for name, kind in Settings.__annotations__.items()
    ]
)


def _path(flag: str, value: Any, inline: bool) -> Any:
    """A class or function as module:name, which all processes of a run can import."""
    if not callable(value):
        return value
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module is None or not name.isidentifier():
        raise ConfigError(f"{flag} must be a class or function of a module's top level: {value!r}")
    script = getattr(sys.modules["__main__"], "__file__", None)
    if module == "__main__" and not inline:
        if script is None or Path(script).suffix != ".py":
            raise ConfigError(
                f"{flag} {name} is defined in a notebook or shell, from which a run's processes "
                f"cannot import it: move it to a file, e.g. mine.py, and give 'mine:{name}'; or "
                "give inline=True to run in this process"
            )
        module = Path(script).stem
    return f"{module}:{name}"


def train(
    config: TrainConfig,
    /,
    on_report: Callable[[Report], object] | None = None,
    *,
    verbose: int = 1,
    **more: Unpack[Settings],
) -> Result:
    """Train until a limit is reached, and return how it ended.

    The run's processes end with this one. Ctrl-C (in a notebook: interrupt) ends the run, which
    saves first; the result says so.

    Args:
        config: the settings.
        on_report: called in this thread about once a second. If it returns False, the run saves
            and ends. An exception that it raises also ends the run, and is raised here.
        verbose: 0 prints nothing but errors and warnings, like quiet=True.
        **more: settings that override those of `config`.

    Raises:
        ConfigError, CheckpointError: a setting cannot work, before anything starts.
        ZapexError: the run failed; the message says why.
    """
    if named.import_under_way():
        raise ConfigError(NO_MAIN_GUARD)
    from zapex.run.collector import Caller
    from zapex.run.train import ending_of

    if not isinstance(config, TrainConfig):
        raise ConfigError(f"zapex.train takes a zapex.TrainConfig, got {type(config).__name__}")
    if not verbose:
        more["quiet"] = True
    config = config.replace(**more)
    caller = Caller(on_report)
    given = {name: value for name, value in config.given.items() if name in FIELDS}
    run = settled(given, config._options())
    settings = prepared(run)
    ending = ending_of(settings, run.spec, caller=caller)
    assert ending.last is not None
    result = Result.of(ending.last, ending.reason)
    if ending.failed:
        raise ZapexError(f"the run in {result.run_dir} has failed: {ending.reason}")
    return result
