"""`zapex replay`, `zapex actor`, `zapex learner`: one run on several hosts, a parent on each."""

import secrets
import time
from dataclasses import replace
from pathlib import Path

from zapex.config.settings import Config
from zapex.envs.environments import EnvironmentSpec
from zapex.errors import (
    ConfigError,
    Fenced,
    PeerError,
    PeerTimeout,
    Refused,
    RunOver,
)
from zapex.net import addresses
from zapex.net.link import ZmqLink
from zapex.run import directory, preflight
from zapex.run.networked import security_of
from zapex.run.parent import run_processes
from zapex.run.run import Membership, Run
from zapex.wire.control import Bye, Welcome

_PATIENCE_S = 3.0  # until the first message about whom we wait for
_REMINDER_S = 30.0
_FAREWELL_S = 5.0
_LOOK_S = 1.0


@preflight.limits_explained()
def run_part(config: Config, spec: EnvironmentSpec, membership: Membership, wrap: str = "") -> int:
    """Run this host's part until it is stopped or the run is over. Returns the exit code.

    The replay's host owns the memory and serves it. An actor host plays. If the replay was started
    anew, or has given this host's actor numbers to another host, it joins again as a new host. The
    learner's host trains until a limit is reached, which ends the whole run. wrap: as in Run.
    """
    resume = config.run.resume
    run = Run(config, spec, Path(resume or config.run.run_dir), membership=membership, wrap=wrap)
    joins = not run.part.listens
    if joins and not resume:  # a refused host leaves no directory
        run = _joined(run)
    with directory.opened(run) as (opened, base):
        run = _joined(opened) if joins and resume else opened
        ending = run_processes(run, base)
        try:
            while ending.again:
                run = _joined(run)
                ending = run_processes(run, base)
        except KeyboardInterrupt:
            print("stopped while this host was joining again")
            return 0  # only actors join again, and they have nothing to save
    if ending.over and joins:
        _tell_all(run, ending.reason)
    return int(ending.failed)


def _tell_all(run: Run, reason: str) -> None:
    """End all hosts. The parent sends this, because its learner may be dead at that moment."""
    assert run.membership is not None
    for shard in range(run.membership.shards):
        link = _link(run, run.membership, shard)
        try:
            link.open(_FAREWELL_S)
        except PeerError:
            print(
                f"the replay at {link.url} could not be told that the run is over: end it yourself"
            )
            link.close()
        else:
            link.close(bye=Bye(over=reason))


def _joined(run: Run) -> Run:
    """The run, with what the replay says about it: numbers, chunk length, epoch.

    Waits for the replay without a limit, and says so; ends at once if the replay refuses.
    Raises ConfigError.
    """
    membership = run.membership
    assert membership is not None
    membership = replace(membership, host=secrets.randbits(62) + 1)
    link = _link(run, membership)
    try:
        welcome = _welcome(link, bool(membership.keys))
    except Fenced as error:
        raise ConfigError(f"{error}: is its clock ahead of this one's?") from None
    except Refused as error:
        raise ConfigError(str(error)) from None
    except RunOver as error:
        raise ConfigError(f"the run at {membership.url} is over: {error}") from None
    finally:
        link.close()
    return replace(
        run,
        membership=replace(
            membership,
            numbers=tuple(welcome.actors["actor"].tolist()),
            total_actors=welcome.total_actors,
            chunk=welcome.chunk,
            epoch=welcome.epoch,
        ),
    )


def _link(run: Run, membership: Membership, shard: int = 0) -> ZmqLink:
    """A link to ask about the run, or to end it. Shard 0 knows the run."""
    schema = run.spec.schema(run.config.replay.n_step, run.config.replay.gamma)
    return ZmqLink(
        membership.all_urls[shard], run.part.linked or "", membership.host, time.time_ns(), None,
        replace(run, membership=membership).settings_at(shard), security_of(membership),
        schema_hash=schema.hash,
        actors=run.config.actor.actors if "actor" in run.part.roles else int(membership.take_over),
    )  # fmt: skip


def _welcome(link: ZmqLink, encrypted: bool) -> Welcome:
    """The replay's first answer, without a time limit."""
    began_s, due_s = time.monotonic(), _PATIENCE_S
    while True:
        try:
            return link.open(1.0)
        except PeerTimeout:
            waited_s = time.monotonic() - began_s
            if waited_s >= due_s:
                due_s = waited_s + _REMINDER_S
                waiting = link.waiting or f"waiting for the replay at {link.url}"
                silent = link.silent_s >= _PATIENCE_S  # otherwise the link has said what is wrong
                why = f": {_why(link.url, encrypted)}" if silent else ""
                print(waiting + why, flush=True)


def _why(url: str, encrypted: bool) -> str:
    """What is there instead of an answer."""
    try:
        found = addresses.mechanism(addresses.parse(url, "--replay"), _LOOK_S)
    except ConnectionError as error:
        return f"{error}; is `zapex replay` started there?"
    if encrypted != (found == "CURVE"):
        return "it has no keys: leave --keys out" if encrypted else "it has keys: give --keys DIR"
    return "a process listens there and does not answer yet: it may be starting" + (
        ", or its keys are of another `zapex keygen`" if encrypted else ""
    )
