"""One reset and one step of an environment before a run, so that its mistakes are told there."""

import traceback
from typing import Any

import numpy as np

from zapex.errors import ConfigError


def take(env_id: str, env: Any) -> None:
    """Reset a Gymnasium environment and play its first action; it is not to be played afterwards.

    Raises ConfigError: a call fails, returns something else than Gymnasium says, or an observation
    does not fit into the environment's observation_space.
    """
    begun = _called(env_id, "reset(seed=0)", lambda: env.reset(seed=0))
    if not isinstance(begun, tuple) or len(begun) != 2:
        raise ConfigError(f"{env_id}: reset must return (observation, info), got {_shown(begun)}")
    _check(env_id, "reset", env.observation_space, begun[0])
    played = _called(env_id, "step", lambda: env.step(env.action_space.start))
    if not isinstance(played, tuple) or len(played) != 5:
        raise ConfigError(
            f"{env_id}: step must return (observation, reward, terminated, truncated, info), got "
            f"{_shown(played)}"
        )
    obs, reward, *ends, _ = played
    _check(env_id, "step", env.observation_space, obs)
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
        mine = last.filename == __file__  # the call itself did not fit
        where = "" if mine else f" ({last.filename}, line {last.lineno})"
        raise ConfigError(
            f"{env_id}: its {what} fails: {type(error).__name__}: {error}{where}"
        ) from error


def _shown(value: Any) -> str:
    """What came instead, in a few words."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"{type(value).__name__}"


def _check(env_id: str, call: str, space: Any, obs: Any, key: str = "") -> None:
    """Raise ConfigError for an observation that has no place in its space's array."""
    from gymnasium.spaces import Dict

    name = f"the observation{key and f' {key!r}'} of its {call}"
    if isinstance(space, Dict):
        missing = [part for part in space.spaces if not isinstance(obs, dict) or part not in obs]
        if missing:
            raise ConfigError(f"{env_id}: {name} must be a dict with the key {missing[0]!r}")
        for part, inner in space.spaces.items():
            _check(env_id, call, inner, obs[part], str(part))
        return
    try:
        array = np.asarray(obs)
    except ValueError as error:
        raise ConfigError(f"{env_id}: {name} cannot be made an array: {error}") from None
    if array.shape != space.shape:
        raise ConfigError(
            f"{env_id}: {name} has shape {array.shape}, and its observation_space has "
            f"{space.shape}: make both the same"
        )
    if not np.can_cast(array.dtype, space.dtype, "same_kind"):
        raise ConfigError(
            f"{env_id}: {name} has dtype {array.dtype}, and its observation_space has "
            f"{space.dtype}: make both the same"
        )
    if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
        raise ConfigError(f"{env_id}: {name} must have finite numbers, got {array!r}")
