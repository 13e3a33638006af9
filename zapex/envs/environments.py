"""Environments by id, module and arguments: the facts that every role needs, and mistakes in them.

Before a run `check` examines an environment and plays one step of it. The processes that play make
their streams from its EnvironmentSpec with `zapex.envs.streams.make`.
"""

import difflib
import math
import os
import re
import traceback
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zapex.agent.architecture import MIN_IMAGE_SIDE
from zapex.chunks.arguments import as_array, column
from zapex.chunks.schema import Column, Schema
from zapex.envs.scores import RANDOM_AND_HUMAN
from zapex.errors import ConfigError, SchemaError, UnknownEnvironment
from zapex.machine import named

MAX_EPISODE_FRAMES = 108_000
"""30 minutes of an Atari console: the usual limit of a game in the literature."""

_LEGACY_ENTRY = "ale_py.env:AtariEnv"
_LEGACY_KEYS = {
    "game",
    "repeat_action_probability",
    "full_action_space",
    "frameskip",
    "max_num_frames_per_episode",
}
_ALE_KWARGS: dict[str, tuple[type, float, float]] = {
    "repeat_action_probability": (float, 0.0, 1.0),
    "full_action_space": (bool, 0, 1),
    "frameskip": (int, 1, 60),
    "stack_num": (int, 1, 16),
    "img_height": (int, MIN_IMAGE_SIDE, 210),
    "img_width": (int, MIN_IMAGE_SIDE, 160),
    "use_fire_reset": (bool, 0, 1),
}
"""Arguments of AtariVectorEnv that a user may set, with ranges; the run sets the others."""

Part = tuple[str, tuple[int, ...], str]
"""A key of a Dict observation, its shape and its dtype."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """All facts of an environment that roles need without making it; JSON-serialisable.

    Attributes:
        env_id, env_kwargs: what is made, and its arguments.
        observation_shape, observation_dtype: of one observation, the stack included: (4, 84, 84)
            uint8 on ALE; other images (channels, height, width) uint8; everything else float32.
        stack: frames in an observation, along its first axis; 1 if there is no such axis.
        num_actions: how many discrete actions there are.
        frames_per_step: emulator frames per step (4 on ALE, else 1).
        atari: whether AtariVectorEnv plays it.
        describe: one line on what is played and how.
        notes: lines that the user should read.
        references: returns to compare with: `random` and `human`, or `solved`.
        played_shape: of the environment's own observation.
        parts: the keys of a Dict observation; they are flattened, one after the other.
        first_action: the environment's number of action 0.
        wrappers: around the environment, as module:Class, the innermost first.
        films: whether it can be filmed (render mode rgb_array).
    """

    env_id: str
    env_kwargs: dict[str, Any]
    observation_shape: tuple[int, ...]
    observation_dtype: str
    stack: int
    num_actions: int
    frames_per_step: int
    atari: bool
    describe: str
    notes: tuple[str, ...] = ()
    references: dict[str, float] = field(default_factory=dict)
    played_shape: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    first_action: int = 0
    wrappers: tuple[str, ...] = ()
    films: bool = True

    def __post_init__(self) -> None:
        # JSON has no tuples; EnvironmentSpec(**json.loads(...)) is the spec that was dumped.
        object.__setattr__(self, "observation_shape", tuple(self.observation_shape))
        object.__setattr__(self, "notes", tuple(self.notes))
        played = tuple(self.played_shape) or self.observation_shape
        object.__setattr__(self, "played_shape", played)
        parts = tuple((key, tuple(shape), dtype) for key, shape, dtype in self.parts)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "wrappers", tuple(self.wrappers))
        object.__setattr__(self, "references", dict(self.references))

    def schema(self, n_step: int, gamma: float) -> Schema:
        """The columns of this environment's transitions."""
        frame = self.observation_shape[1:] if self.stack > 1 else self.observation_shape
        columns = {
            "obs": Column(frame, self.observation_dtype, stack=self.stack),
            "action": Column((), np.int64),
        }
        return Schema(columns, n_step=n_step, gamma=gamma)

    def write(self, obs: Any, out: NDArray[Any]) -> None:
        """Write the environment's own observations into `out` (B, *observation_shape).

        The parts of a Dict are flattened, one after the other.
        """
        start = 0
        for key, shape, _ in self.parts:
            end = start + math.prod(shape)
            out[:, start:end] = np.reshape(obs[key], (len(out), -1))
            start = end
        if self.parts:
            return
        if self.observation_dtype == "uint8" and _is_channels_last(self.played_shape):
            obs = np.moveaxis(obs, -1, 1)
        out[:] = obs.reshape(out.shape)

    def batch_of(self, obs: Any) -> tuple[NDArray[Any], bool]:
        """The environment's own observations as a network's batch, and if it was a single one.

        Raises:
            ConfigError: they have neither the environment's shape nor one more axis in front.
            SchemaError: numbers do not fit into the dtype.
        """
        parts = self.parts or (("", self.played_shape, self.observation_dtype),)
        arrays, leads = {}, set()
        for key, shape, dtype in parts:
            if self.parts and not (isinstance(obs, Mapping) and key in obs):
                raise ConfigError(
                    f"an observation must be a dict with the key {key!r}, got {obs!r}"
                )
            name = f"an observation{key and f' {key!r}'}"
            array = as_array(obs[key] if self.parts else obs, name)
            lead = array.ndim - len(shape)
            if lead not in (0, 1) or array.shape[lead:] != shape:
                raise ConfigError(
                    f"{name} must have shape {shape}, or (B, {', '.join(map(str, shape))}) for B "
                    f"of them, got {array.shape}"
                )
            array = column(array, np.dtype(dtype), array.shape, name)
            leads.add(array.shape[:lead])
            arrays[key] = array.reshape(-1, *shape)
        if len(leads) > 1:
            raise ConfigError(f"the parts of an observation must be of one batch, got {leads}")
        out = np.empty((len(arrays[key]), *self.observation_shape), self.observation_dtype)
        self.write(arrays if self.parts else arrays[key], out)
        return out, leads == {()}


def check(
    env_id: str, env_kwargs: Mapping[str, Any] | None = None, wrappers: Sequence[str] = ()
) -> EnvironmentSpec:
    """The facts of an environment; `make` takes them.

    Args:
        env_id: a Gymnasium id (all of ale_py's among them), `module:Id`, or `module:callable`: a
            class of gymnasium.Env, or a function that is declared to return one. Modules are also
            searched in the working directory.
        env_kwargs: arguments of the environment.
        wrappers: as in EnvironmentSpec; with one, an ALE game is played as in Gymnasium: in colour,
            210x160, frames not stacked.

    Raises:
        UnknownEnvironment: no environment has this id; the message names the nearest ids.
        ConfigError: spaces that training does not support, or arguments that do not work.
    """
    kwargs = dict(env_kwargs or {})
    source = find(env_id)
    game = game_of(source)
    if game is not None and not wrappers:
        return _check_ale(env_id, source, game, kwargs)
    env = make_one(env_id, source, kwargs, wrappers)
    try:
        return _check_spaces(env_id, source, kwargs, wrappers, env)
    finally:
        env.close()


def find(env_id: str) -> Any:
    """The gymnasium EnvSpec, or the callable, that `env_id` names; raises as `check` does."""
    import ale_py
    import gymnasium

    # It prints a banner whenever a ROM is loaded.
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    module_name, _, name = env_id.rpartition(":")
    module = _import(env_id, module_name) if module_name else None
    if callable(found := getattr(module, name, None)):
        return found
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    nearest = _similar_ids(name, list(gymnasium.registry))
    if module is not None and not nearest:
        raise UnknownEnvironment(
            f"no environment is called {env_id!r}: module {module_name} has no callable {name!r}, "
            f"and registers no such id{_similar_in_module(module, name)}"
        )
    about = _about_files(env_id)
    if not about:
        about = f": did you mean {' or '.join(nearest)}?" if nearest else "."
        about += " Give your own as module:Id or module:callable"
    raise UnknownEnvironment(f"no environment is called {env_id!r}{about}")


def _import(env_id: str, module_name: str) -> ModuleType:
    if "/" in module_name:
        raise UnknownEnvironment(f"no environment is called {env_id!r}{_about_files(env_id)}")
    try:
        return named.module(module_name, env_id)
    except ModuleNotFoundError as error:
        raise UnknownEnvironment(
            f"no environment is called {env_id!r}: there is no module {error.name!r} in "
            f"{os.getcwd()} or among the installed packages{_about_files(env_id)}"
        ) from None


def game_of(source: Any) -> str | None:
    """The ROM of an ale_py id; None for all other environments."""
    if getattr(source, "entry_point", None) != _LEGACY_ENTRY or set(source.kwargs) - _LEGACY_KEYS:
        return None
    return str(source.kwargs["game"])


def _check_ale(env_id: str, source: Any, game: str, kwargs: dict[str, Any]) -> EnvironmentSpec:
    for name, value in kwargs.items():
        if name not in _ALE_KWARGS:
            raise ConfigError(
                f"{env_id} takes no argument {name!r} here; it takes {', '.join(_ALE_KWARGS)}"
            )
        kind, low, high = _ALE_KWARGS[name]
        numeric = isinstance(value, (int, float)) and isinstance(value, bool) == (kind is bool)
        if not numeric or not low <= value <= high or value != kind(value):
            says = "true or false" if kind is bool else f"{low} to {high}"
            raise ConfigError(f"{name} must be {says}, got {value!r}")
    settings = ale_settings(source, kwargs)
    sticky, skip = settings["repeat_action_probability"], settings["frameskip"]
    stack, size = settings["stack_num"], (settings["img_height"], settings["img_width"])
    notes, registered_skip = [], source.kwargs["frameskip"]
    if registered_skip != skip:
        theirs = "2 to 4" if isinstance(registered_skip, tuple) else registered_skip
        notes.append(
            f"{env_id} is played as AtariVectorEnv plays {game}: each action for {skip} frames "
            f"(the id's own: {theirs}), {size[0]}x{size[1]} grey, {stack} frames stacked"
        )
    return EnvironmentSpec(
        env_id=env_id,
        env_kwargs=kwargs,
        observation_shape=(stack, *size),
        observation_dtype="uint8",
        stack=stack,
        num_actions=_count_actions(game, settings["full_action_space"]),
        frames_per_step=skip,
        atari=True,
        describe=(
            f"{env_id}: ALE's {game}, {skip} frames a step, {size[0]}x{size[1]} grey, {stack} "
            f"stacked, actions stick with probability {sticky:g}; an episode is a whole game, "
            "a lost life only ends the return"
        ),
        notes=tuple(notes),
        references=dict(zip(("random", "human"), RANDOM_AND_HUMAN.get(game, ()), strict=False)),
    )


def ale_settings(source: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of AtariVectorEnv that shape what is learned; `source` is Gymnasium's entry.

    Actions stick with the id's probability: 0.25 for v0 and v5, 0 for v4. There is no FIRE at
    reset: it would start only the first of Breakout's five balls, and the agent has to learn it for
    the others anyway.
    """
    return {
        "repeat_action_probability": source.kwargs["repeat_action_probability"],
        "full_action_space": False,
        "frameskip": 4,
        "stack_num": 4,
        "img_height": 84,
        "img_width": 84,
        "use_fire_reset": False,
        **kwargs,
    }


@cache
def _count_actions(game: str, full: bool) -> int:
    import ale_py
    from ale_py import roms

    ale = ale_py.ALEInterface()
    ale.loadROM(roms.get_rom_path(game))
    return len(ale.getLegalActionSet() if full else ale.getMinimalActionSet())


def make_one(
    env_id: str,
    source: Any,
    kwargs: Mapping[str, Any],
    wrappers: Sequence[str] = (),
    max_episode_steps: int = 0,
    render_mode: str | None = None,
) -> Any:
    """One Gymnasium environment, truncated at the smaller of its limit and `max_episode_steps`."""
    import gymnasium

    if callable(source) and not _makes_environments(source):
        raise ConfigError(
            f"{env_id} must be a gymnasium.Env class, or a function that is declared to return "
            f"one: def {env_id.rpartition(':')[2]}(...) -> gymnasium.Env"
        )
    options = dict(kwargs) if render_mode is None else {**kwargs, "render_mode": render_mode}
    try:
        if isinstance(source, gymnasium.envs.registration.EnvSpec):
            limits = [n for n in (source.max_episode_steps, max_episode_steps) if n]
            env = gymnasium.make(source, max_episode_steps=min(limits, default=None), **options)
            return _wrapped(env_id, env, wrappers)
        env = source(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{env_id} cannot be made with {options}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"{env_id} must return a gymnasium.Env, got {type(env).__name__}")
    if max_episode_steps:
        env = gymnasium.wrappers.TimeLimit(env, max_episode_steps)
    return _wrapped(env_id, env, wrappers)


def _wrapped(env_id: str, env: Any, wrappers: Sequence[str]) -> Any:
    import gymnasium

    for wrapper in wrappers:
        wrap = named.load(wrapper, "--wrapper")
        try:
            env = wrap(env)
        except Exception as error:
            raise ConfigError(
                f"--wrapper {wrapper} cannot wrap {env_id}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(env, gymnasium.Env):
            raise ConfigError(
                f"--wrapper {wrapper} must return a gymnasium.Env, got {type(env).__name__}"
            )
    return env


def _makes_environments(source: Any) -> bool:
    """Whether an object is declared to make environments; this does not call it."""
    import gymnasium

    kind = source
    if not isinstance(source, type):
        try:
            declared = typing.get_type_hints(source).get("return")
        except (NameError, TypeError, AttributeError):  # a name that only type checkers know
            declared = None
        kind = typing.get_origin(declared) or declared
    return isinstance(kind, type) and issubclass(kind, gymnasium.Env)


def _space(env_id: str, env: Any, name: str) -> Any:
    try:
        return getattr(env, name)
    except AttributeError:
        raise ConfigError(
            f"{env_id} must have an {name}, a space of gymnasium.spaces: set it in the class or in "
            "__init__"
        ) from None


def _check_spaces(
    env_id: str, source: Any, kwargs: dict[str, Any], wrappers: Sequence[str], env: Any
) -> EnvironmentSpec:
    from gymnasium.spaces import Discrete

    actions = _space(env_id, env, "action_space")
    if not isinstance(actions, Discrete):
        raise ConfigError(
            f"training supports Discrete actions only, and the actions of {env_id} are {actions}"
        )
    seen = _form_of(env_id, _space(env_id, env, "observation_space"))
    _play_one_step(env_id, env)
    images = seen.dtype == "uint8" and seen.shape == env.observation_space.shape
    stack = _frames_stacked(env) if images else 1
    notes = list(seen.notes)
    skip = {**getattr(source, "kwargs", {}), **kwargs}.get("frameskip", 1)
    game = game_of(source)
    if game is not None and stack == 1:
        notes.append(f"with a wrapper {env_id} is played as in Gymnasium: frames not stacked")
    limit = getattr(source, "max_episode_steps", None)
    threshold = getattr(source, "reward_threshold", None)
    played = "".join(f", in {wrapper}" for wrapper in wrappers)
    return EnvironmentSpec(
        env_id=env_id,
        env_kwargs=kwargs,
        observation_shape=seen.shape,
        observation_dtype=seen.dtype,
        stack=stack,
        num_actions=int(actions.n),
        frames_per_step=skip if game is not None and isinstance(skip, int) else 1,
        atari=False,
        describe=f"{env_id}{played}: observations {seen.shape} {seen.dtype}, {actions.n} actions"
        + (f", {stack} frames stacked" if stack > 1 else "")
        + (f", at most {limit:,} steps an episode" if limit else ""),
        notes=tuple(notes),
        references={"solved": float(threshold)} if threshold is not None else {},
        played_shape=env.observation_space.shape or (),
        parts=seen.parts,
        first_action=int(actions.start),
        wrappers=tuple(wrappers),
        films="rgb_array" in env.metadata.get("render_modes", ()),
    )


def _frames_stacked(env: Any) -> int:
    """The frames that Gymnasium's FrameStackObservation stacks, which are stored once; or 1.

    Wrappers that gymnasium.make adds around it leave observations as they are.
    """
    from gymnasium import wrappers

    while isinstance(
        env, (wrappers.TimeLimit, wrappers.OrderEnforcing, wrappers.PassiveEnvChecker)
    ):
        env = env.env
    return int(env.stack_size) if isinstance(env, wrappers.FrameStackObservation) else 1


# Observations: the environment's own, and the form that training uses.


def _is_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether images of this shape are (height, width, channels), as in most of Gymnasium."""
    return len(shape) == 3 and shape[2] in (1, 3, 4) and shape[0] > 4


class _Form(NamedTuple):
    """The form of a space's observations in training."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()


def _form_of(env_id: str, space: Any) -> _Form:
    """The form of a Box, or of a Dict of them, which becomes one vector.

    uint8 images become (channels, height, width), a Dict of uint8 stays uint8, and all else becomes
    float32. Raises ConfigError for another space; the message names a wrapper that helps.
    """
    from gymnasium.spaces import Box, Dict

    if isinstance(space, Dict):
        return _form_of_dict(env_id, space)
    if not isinstance(space, Box):
        raise ConfigError(
            "training supports Box observations (uint8 images, or vectors of numbers) and a Dict "
            f"of them, but those of {env_id} are {space}: convert them with "
            "--wrapper gymnasium.wrappers:FlattenObservation, or your own wrapper"
        )
    shape, dtype = space.shape, space.dtype
    if dtype == np.uint8 and len(shape) == 2:
        return _Form((1, *shape), "uint8")
    if dtype == np.uint8 and len(shape) == 3:
        if not _is_channels_last(shape):
            return _Form(shape, "uint8")
        turned = (shape[2], *shape[:2])
        note = f"images of {env_id} are converted from {shape} to {turned}"
        return _Form(turned, "uint8", notes=(note,))
    if dtype == np.uint8 and len(shape) > 3:
        raise ConfigError(
            f"observations of {env_id} have {len(shape)} axes, {shape}, and images have three: "
            "make each frame grey before it is stacked, as --wrapper zapex.envs.wrappers:Grey84 "
            "--wrapper mine:Stack does"
        )
    if not np.issubdtype(dtype, np.floating):
        return _Form(
            shape, "float32", notes=(f"observations of {env_id}, {dtype}, are learned as float32",)
        )
    return _Form(shape, "float32")


def _form_of_dict(env_id: str, space: Any) -> _Form:
    from gymnasium.spaces import Box

    parts = []
    for key, part in space.spaces.items():
        if not isinstance(part, Box):
            raise ConfigError(
                f"training supports a Dict of Box observations, but {key!r} of {env_id} is {part}: "
                "convert it with your own --wrapper"
            )
        parts.append((str(key), part.shape, "uint8" if part.dtype == np.uint8 else "float32"))
    if not parts:
        raise ConfigError(f"an observation of {env_id} is a Dict without keys")
    size = sum(math.prod(shape) for _, shape, _ in parts)
    dtype = "uint8" if all(dtype == "uint8" for *_, dtype in parts) else "float32"
    notes = [f"the Dict of {env_id} ({', '.join(key for key, *_ in parts)}) is kept as one vector"]
    if any(dtype == "uint8" and len(shape) > 1 for _, shape, dtype in parts):
        notes.append("for its images give your own --network: it gets each part by its key")
    return _Form((size,), dtype, tuple(parts), tuple(notes))


# The first step


def _play_one_step(env_id: str, env: Any) -> None:
    """Reset a Gymnasium environment and play its first action, so that mistakes show before a run.

    Raises ConfigError: a call fails, violates Gymnasium's interface, or an observation does not fit
    into the environment's observation_space.
    """
    begun = _called(env_id, "reset(seed=0)", lambda: env.reset(seed=0))
    if not isinstance(begun, tuple) or len(begun) != 2:
        raise ConfigError(f"{env_id}: reset must return (observation, info), got {_shown(begun)}")
    _check_observation(env_id, "reset", env.observation_space, begun[0])
    played = _called(env_id, "step", lambda: env.step(env.action_space.start))
    if not isinstance(played, tuple) or len(played) != 5:
        raise ConfigError(
            f"{env_id}: step must return (observation, reward, terminated, truncated, info), got "
            f"{_shown(played)}"
        )
    obs, reward, *ends, _ = played
    _check_observation(env_id, "step", env.observation_space, obs)
    try:
        finite = bool(np.isfinite(float(reward)))
    except (TypeError, ValueError):
        finite = False
    if not finite:
        raise ConfigError(f"{env_id}: the reward of a step must be a number, got {reward!r}")
    for name, over in zip(("terminated", "truncated"), ends, strict=True):
        if np.shape(over) != () or not isinstance(over, (bool, int, np.bool_, np.integer)):
            raise ConfigError(f"{env_id}: {name} of a step must be a bool, got {over!r}")


def _called(env_id: str, what: str, call: Any) -> Any:
    try:
        return call()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = last.filename == __file__  # the call itself did not fit
        where = "" if ours else f" ({last.filename}, line {last.lineno})"
        raise ConfigError(
            f"{env_id}: its {what} fails: {type(error).__name__}: {error}{where}"
        ) from error


def _shown(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def _check_observation(env_id: str, call: str, space: Any, obs: Any, key: str = "") -> None:
    """Raise ConfigError if an observation does not fit into its space."""
    from gymnasium.spaces import Dict

    name = f"the observation{key and f' {key!r}'} of {call}"
    if isinstance(space, Dict):
        missing = [part for part in space.spaces if not isinstance(obs, dict) or part not in obs]
        if missing:
            raise ConfigError(f"{env_id}: {name} must be a dict with the key {missing[0]!r}")
        for part, inner in space.spaces.items():
            _check_observation(env_id, call, inner, obs[part], str(part))
        return
    try:
        array = column(obs, space.dtype, space.shape, name)
    except SchemaError as error:
        raise ConfigError(
            f"{env_id}: {error}: return what its observation_space says, or change that"
        ) from None
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ConfigError(f"{env_id}: {name} must have finite numbers, got {array!r}")


# Suggestions for misspelt names


def _similar_ids(name: str, known: list[str]) -> list[str]:
    """Up to three ids similar to `name`, without the parts that many ids share."""
    stems: dict[str, str] = {}
    for one in sorted(known, key=lambda known: (known.startswith("ALE/"), _version(known))):
        stems[_stem(one)] = one  # the last wins: ALE/Pong-v5 over Pong-v4, v1 over v0
    close = difflib.get_close_matches(_stem(name), list(stems), n=3, cutoff=0.65)
    return [stems[stem] for stem in close]


def _stem(env_id: str) -> str:
    return re.sub(r"^ale/|(noframeskip|deterministic)?(-ram)?(-v\d+)?$", "", env_id.lower())


def _version(env_id: str) -> int:
    match = re.search(r"-v(\d+)$", env_id)
    return int(match[1]) if match else 0


def _similar_in_module(module: ModuleType, name: str) -> str:
    """`"; did you mean module:Name?"`, a class or function of the user's module, or ""."""
    callables = [key for key, value in vars(module).items() if callable(value)]
    close = difflib.get_close_matches(name, callables, n=1, cutoff=0.6)
    return f"; did you mean {module.__name__}:{close[0]}?" if close else ""


def _about_files(env_id: str) -> str:
    """What a name means that resembles a file of the working directory; "": none does."""
    if env_id.endswith(".toml"):
        return f"; give a settings file as --config {env_id}"
    module, colon, name = env_id.rpartition(":")
    path = module if colon else env_id
    if path.endswith(".py") or (colon and "/" in path):
        stem = Path(path).stem
        return (
            f"; name a module without directory and .py: start zapex in the directory of {stem}.py "
            f"and give {stem}:{name if colon else 'Class'}"
        )
    if colon:
        close = difflib.get_close_matches(module, [p.stem for p in Path().glob("*.py")], 1, 0.7)
        return f"; did you mean {close[0]}:{name}?" if close else ""
    before, _, last = env_id.rpartition(".")
    if before and Path(before.replace(".", "/") + ".py").is_file():
        return f"; did you mean {before}:{last}?"
    here = Path(f"{env_id}.py").is_file()
    return f"; {env_id}.py is here: give the class in it as {env_id}:Class" if here else ""
