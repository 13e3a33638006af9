"""What a misspelt name of an environment may mean."""

import difflib
import re
from pathlib import Path
from types import ModuleType


def ids(name: str, known: list[str]) -> list[str]:
    """Up to three ids similar to `name`; parts that all ids share do not count."""
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


def in_module(module: ModuleType, name: str) -> str:
    """`"; did you mean module:Name?"`, of the classes and functions of a user's module, or ""."""
    callables = [key for key, value in vars(module).items() if callable(value)]
    close = difflib.get_close_matches(name, callables, n=1, cutoff=0.6)
    return f"; did you mean {module.__name__}:{close[0]}?" if close else ""


def file(env_id: str) -> str:
    """What a name means that is near a file of the working directory; "" if none is."""
    if env_id.endswith(".toml"):
        return f"; settings in a file are given as --config {env_id}"
    module, colon, name = env_id.rpartition(":")
    path = module if colon else env_id
    if path.endswith(".py") or (colon and "/" in path):
        stem = Path(path).stem
        return (
            f"; a module is named without directory and .py: start zapex where {stem}.py lies and "
            f"give {stem}:{name if colon else 'Class'}"
        )
    if colon:
        close = difflib.get_close_matches(module, [p.stem for p in Path().glob("*.py")], 1, 0.7)
        return f"; did you mean {close[0]}:{name}?" if close else ""
    before, _, last = env_id.rpartition(".")
    if before and Path(before.replace(".", "/") + ".py").is_file():
        return f"; did you mean {before}:{last}?"
    here = Path(f"{env_id}.py").is_file()
    return f"; {env_id}.py is here: give the class in it as {env_id}:Class" if here else ""
