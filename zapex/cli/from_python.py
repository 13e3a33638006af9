"""`zapex.train`: `zapex train` for Python programs and notebooks."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zapex.cli.flags import ALIASES, flags_of
from zapex.cli.resolve import Options, prepared, settled
from zapex.config.fields import flag_of, parse_count
from zapex.config.settings import FIELDS, Config, merged
from zapex.config.words import did_you_mean
from zapex.errors import ConfigError, ZapexError
from zapex.machine import named
from zapex.watch.report import Report, Result

_OPTIONS = tuple(flags_of(Options))
NO_MAIN_GUARD = (
    "zapex.train was called while a run imports this module, and would start another run in each "
    'of its processes: put the call under `if __name__ == "__main__":`'
)


class TrainConfig:
    """The settings of a run, named as the flags: `TrainConfig(env="CartPole-v1", lr=1e-3)`.

    Other settings come from `config` (a file) or `preset`, as on the command line. Counts may be
    text ("200k"). `env`, `network`, `loss` and `wrapper` take text, as their flags do, or a class
    or function.

    Raises:
        ConfigError: no setting has this name (with the nearest one), or a value cannot work.
    """

    def __init__(self, **settings: Any) -> None:
        values: dict[str, Any] = {}
        for given, value in settings.items():
            name = ALIASES.get(given, given)
            if name not in FIELDS and name not in _OPTIONS:
                near = did_you_mean(name, [*FIELDS, *_OPTIONS])
                raise ConfigError(f"TrainConfig has no setting {given!r}{near}")
            whole = name in FIELDS and FIELDS[name][1].type is int
            values[name] = parse_count(value) if whole and isinstance(value, str) else value
            if name == "wrapper" and not isinstance(value, (list, tuple)):
                values[name] = [value]
        inline = bool(values.get("inline"))
        for name, value in values.items():
            many = isinstance(value, (list, tuple))
            paths = [_path(flag_of(name), each, inline) for each in (value if many else [value])]
            values[name] = paths if many else paths[0]
        self.values = values
        checked = {name: value for name, value in values.items() if name in FIELDS}
        merged(vars(Config()), checked)
        self._options()

    def __repr__(self) -> str:
        return f"TrainConfig({', '.join(f'{k}={v!r}' for k, v in self.values.items())})"

    def replace(self, **changes: Any) -> "TrainConfig":
        """The same settings with some changed. Raises ConfigError, as the class does."""
        return TrainConfig(**{**self.values, **changes})

    def _options(self) -> Options:
        return Options(**{name: self.values[name] for name in _OPTIONS if name in self.values})


TrainConfig.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in (*FIELDS, *_OPTIONS)
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
    config: TrainConfig, on_report: Callable[[Report], object] | None = None, **more: Any
) -> Result:
    """Train until a limit is reached, and return how it ended.

    The run's processes end with this one. Ctrl-C (in a notebook: interrupt) ends the run, which
    saves first; the result says so.

    Args:
        config: the settings.
        on_report: called in this thread about once a second. If it returns False, the run saves
            and ends. An exception that it raises also ends the run, and is raised here.
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
    config = config.replace(**more)
    caller = Caller(on_report)
    given = {name: value for name, value in config.values.items() if name in FIELDS}
    run = settled(given, config._options())
    settings = prepared(run)
    ending = ending_of(settings, run.spec, caller=caller)
    assert ending.last is not None
    result = Result.of(ending.last, ending.reason)
    if ending.failed:
        raise ZapexError(f"the run in {result.run_dir} has failed: {ending.reason}")
    return result
