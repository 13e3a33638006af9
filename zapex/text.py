"""Values as people write them: counts like 200k, and TOML."""

import json
import re
from typing import Any

from zapex.errors import ConfigError

_COUNT_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def parse_count(text: str) -> int:
    """`"200k"`, `"2e5"`, `"10M"`, `"50_000"` -> the whole number meant.

    Raises:
        ConfigError: the text is no number, or not a whole one.
    """
    match = re.fullmatch(r"([-+]?[0-9][0-9_]*)?(\.[0-9]+)?(e[-+]?[0-9]+)?([kmgb]?)", text.lower())
    if match and (match[1] or match[2]):
        # Decimal text times a power of ten is exact in integers, where floats would round.
        whole, fraction = match[1] or "0", (match[2] or ".")[1:]
        exponent = int((match[3] or "e0")[1:])
        if abs(exponent) <= 18:
            digits = int(whole.replace("_", "") + fraction) * _COUNT_SUFFIXES[match[4]]
            shift = exponent - len(fraction)
            value, rest = divmod(digits * int(10 ** max(shift, 0)), int(10 ** max(-shift, 0)))
            if rest == 0:
                return value
    raise ConfigError(f"a count must be a whole number like 5000, 200k, 2e5 or 10M, got {text!r}")


def toml_value(value: Any, name: str) -> str:
    """One plain value as TOML writes it; ConfigError for what TOML has no word for."""
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the one control character that JSON leaves alone.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item, name) for item in value) + "]"
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        items = (f"{toml_value(key, name)} = {toml_value(value[key], name)}" for key in value)
        return "{" + ", ".join(items) + "}"
    raise ConfigError(
        f"{name} must be text, a number, true, false, a list or a table, got {value!r}"
    )
