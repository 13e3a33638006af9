"""Tries F-Stack in a child process: where it cannot start, it prints why and ends the process."""

import importlib.util
import os
import re
import signal
import subprocess
import sys

from zapex.errors import ConfigError
from zapex.fstack import Setup
from zapex.fstack.loop import FstackReactor, Loop, NotStarted
from zapex.machine.child import PARENT_VARIABLE, child_setup

_START_S = 60.0  # a port may take ten seconds until its link is up
_REFUSED = 3
_REASON = re.compile(r"error|fail|cannot|could not|unable|invalid|cause|fatal|panic", re.I)
_MOST_LINES = 3


def check(setup: Setup | None, host: str, port: int, flag: str) -> None:
    """Raise ConfigError if F-Stack does not start here, or cannot listen at this address."""
    if setup is None or not setup.library or not setup.config:
        raise ConfigError(
            f"{flag} fstack:// needs --fstack-lib PATH, F-Stack's shared library, and "
            "--fstack-conf FILE, its configuration"
        )
    if importlib.util.find_spec("greenlet") is None:
        raise ConfigError(f"{flag} fstack:// needs greenlet: pip install 'zapex[fstack]'")
    words = [setup.library, setup.config, setup.arguments, host, str(port)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "zapex.fstack.trial", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=_START_S,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        raise ConfigError(
            f"F-Stack has not started within {_START_S:.0f} s{_quoted(output)}"
        ) from None
    if done.returncode == 0:
        return
    if done.returncode == _REFUSED:
        raise ConfigError(done.stdout.splitlines()[-1])
    ended = "cannot start"
    if done.returncode < 0:
        ended = f"was ended by {signal.Signals(-done.returncode).name} when it started"
    raise ConfigError(
        f"F-Stack {ended} with --fstack-lib {setup.library} --fstack-conf {setup.config}"
        + _quoted(done.stdout)
    )


def _quoted(output: str) -> str:
    """The lines of the output that may give the reason."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line for line in lines if _REASON.search(line)] or lines
    return f". Its output: {'; '.join(said[-_MOST_LINES:])}" if said else ""


def _try(setup: Setup, host: str, port: int) -> None:
    reactor = FstackReactor(Loop(setup))
    try:
        reactor.listen(host, port)
    except OSError as error:
        raise ConfigError(
            f"F-Stack cannot listen at {host}:{port}: {error.strerror}. Its addresses are those "
            "of [port0] and others in --fstack-conf"
        ) from None
    reactor.close_all()


def main() -> None:
    """The process that tries it."""
    child_setup("trial of F-Stack")
    *setup, host, port = sys.argv[1:]
    try:
        _try(Setup(*setup), host, int(port))
    except NotStarted:
        sys.exit(1)  # what F-Stack has printed says more
    except ConfigError as error:
        print(f"\n{error}", flush=True)
        sys.exit(_REFUSED)


if __name__ == "__main__":
    main()
