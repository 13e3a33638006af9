"""`zapex replay`, `zapex actor`, `zapex learner`: one run on several hosts, a parent on each."""

import secrets
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from zapex import addresses, recorders
from zapex.config import Config
from zapex.curve_keys import KEY_OF
from zapex.environments import EnvironmentSpec
from zapex.errors import (
    ConfigError,
    Fenced,
    PeerError,
    PeerTimeout,
    Refused,
    RunOver,
)
from zapex.host_plan import FENCED, NEWS, OVER
from zapex.hosts import security_of
from zapex.launch import Session
from zapex.messages import Bye, Welcome
from zapex.monitor import Monitor
from zapex.run import Place, Run
from zapex.shm_transport import Host
from zapex.zmq_client import ZmqLink

_PATIENCE_S = 3.0  # until the first word of whom we wait for
_REMINDER_S = 30.0
_FAREWELL_S = 5.0
_LOOK_S = 1.0


@dataclass
class PartSession(Session):
    """One life of this host's part of a run. `again`: it must join the run anew."""

    again: bool = field(default=False, init=False)

    def _part_in_words(self) -> str:
        place = self.run.place
        assert place is not None
        where = "at" if place.part == "replay" else "of the replay at"
        return f"{place.part} {where} {place.url}"

    def _look_after(self, host: Host, monitor: Monitor) -> None:
        """What the role with the link has to say."""
        consumer = host.ring("notices").consumer()
        for record in consumer.take(consumer.ring.capacity):
            kind, text = int(record["kind"]), bytes(record["text"]).decode(errors="replace")
            if kind == NEWS:
                monitor.message(text)
            else:
                self._obey(kind, text)

    def _obey(self, kind: int, text: str) -> None:
        if self.reason:
            return
        if kind == OVER:
            self.reason = f"the run is over: {text}"
        elif kind == FENCED and self.plan.part == "actor":
            self.again = True
            self.reason = f"{text}: joining again"
        else:
            self.failed = True
            self.reason = text

    def _ended(self, name: str, host: Host, monitor: Monitor) -> None:
        self._look_after(host, monitor)  # its last words
        if not self.reason:
            self.reason = f"{name} ended without a word: look into {self.run.run_dir}/logs"
            self.failed = True


def replay(config: Config, spec: EnvironmentSpec, place: Place) -> int:
    """Own the memory and serve it at `place.url` until stopped, or until the run is over."""
    run = Run(config, spec, Path(config.run.run_dir), place=place)
    _make_directory(run)
    return PartSession(run).run_processes()


def actor(config: Config, spec: EnvironmentSpec, place: Place) -> int:
    """Play on this host until stopped, or until the run is over.

    Where the replay has begun anew, or has given this host's actor numbers to another, the host
    joins once more, as a new one.
    """
    run = _joined(Run(config, spec, Path(config.run.run_dir), place=place))
    _make_directory(run)
    while True:
        session = PartSession(run)
        code = session.run_processes()
        if not session.again:
            return code
        run = _joined(run)


def learner(config: Config, spec: EnvironmentSpec, place: Place) -> int:
    """Train on what the replay samples, until a limit is reached: that ends the whole run."""
    resume = config.run.resume
    run = Run(config, spec, Path(resume or config.run.run_dir), place=place)
    run = _joined(run)
    base = recorders.read_base(run.run_dir) if resume else {}
    _make_directory(run, exists=bool(resume))
    run = replace(run, steps_before=int(base.get("steps", 0)))
    session = PartSession(run, base)
    code = session.run_processes()
    if session.over:
        _tell_all(run, session.reason)
    return code


def _tell_all(run: Run, reason: str) -> None:
    """Everybody ends. The parent says it: its learner may have been dead at that moment."""
    assert run.place is not None
    link = _link(run, run.place)
    try:
        link.open(_FAREWELL_S)
    except PeerError:
        print(f"the replay at {link.url} does not hear that the run is over: end it by hand")
        link.close()
    else:
        link.close(bye=Bye(over=reason))


def _make_directory(run: Run, *, exists: bool = False) -> None:
    run.run_dir.mkdir(parents=True, exist_ok=exists)
    (run.run_dir / "config.toml").write_text(run.config.to_toml(), encoding="utf-8")


def _joined(run: Run) -> Run:
    """The run, with what the replay said of it: numbers, chunk length, epoch.

    Waits for the replay as long as it takes, and says so; ends at once where it refuses.
    Raises ConfigError.
    """
    place = run.place
    assert place is not None
    place = replace(place, host=secrets.randbits(62) + 1)
    link = _link(run, place)
    try:
        welcome = _welcome(link, bool(place.keys))
    except Fenced as error:
        raise ConfigError(f"{error}: is its clock ahead of this one's?") from None
    except Refused as error:
        raise ConfigError(f"{error}; give all commands of a run the same --config") from None
    except RunOver as error:
        raise ConfigError(f"the run at {place.url} is over: {error}") from None
    finally:
        link.close()
    return replace(
        run,
        place=replace(
            place,
            numbers=tuple(welcome.actors["actor"].tolist()),
            total_actors=welcome.total_actors,
            chunk=welcome.chunk,
            epoch=welcome.epoch,
        ),
    )


def _link(run: Run, place: Place) -> ZmqLink:
    """To ask what the run is like, or to end it."""
    schema = run.spec.schema(run.config.replay.n_step, run.config.replay.gamma)
    return ZmqLink(
        place.url, KEY_OF[place.part], place.host, time.time_ns(), None, run.config.shared(),
        security_of(place), schema_hash=schema.hash,
        actors=run.config.actor.actors if place.part == "actor" else 0,
    )  # fmt: skip


def _welcome(link: ZmqLink, encrypted: bool) -> Welcome:
    """The replay's first answer, however long it takes."""
    began_s, due_s = time.monotonic(), _PATIENCE_S
    while True:
        try:
            return link.open(1.0)
        except PeerTimeout:
            waited_s = time.monotonic() - began_s
            if waited_s >= due_s:
                due_s = waited_s + _REMINDER_S
                waiting = link.waiting or f"waiting for the replay at {link.url}"
                silent = link.silent_s >= _PATIENCE_S  # else it has said itself what is amiss
                why = f": {_why(link.url, encrypted)}" if silent else ""
                print(waiting + why, flush=True)


def _why(url: str, encrypted: bool) -> str:
    """What there is instead of an answer."""
    try:
        found = addresses.mechanism(addresses.parse(url, "--replay"), _LOOK_S)
    except ConnectionError as error:
        return f"{error}; is `zapex replay` started there?"
    if encrypted != (found == "CURVE"):
        return "it has no keys: leave --keys out" if encrypted else "it has keys: give --keys DIR"
    return "somebody listens; it is about to start" + (
        ", or its keys are of another `zapex keygen`" if encrypted else ""
    )
