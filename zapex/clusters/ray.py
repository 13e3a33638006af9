"""Ray: a placement group for replay and learner, and a Ray actor for each host.

A Ray actor (RayHost) starts the ordinary command as a child. It outlives the process that launched
it, and Ray restarts it elsewhere when its node is lost. The launching process watches: it gives
each host its keys, and adds actor hosts as the cluster grows. Experience never passes through Ray.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from zapex.clusters.host import FACTS, KEYS, OVER, SETTINGS, published, url_name
from zapex.clusters.placement import KEY_OF, Group, Host, Placement, host_words
from zapex.errors import ConfigError, ZapexError
from zapex.machine.child import PARENT_VARIABLE
from zapex.machine.disk import replace_whole
from zapex.machine.reading import read_text

NAMESPACE = "zapex"
_LOOK_S = 1.0
_GROW_S = 5.0
_ANSWER_S = 5.0
_TAIL_BYTES = 1 << 20
_NO_KEYS = "waiting for keys"


class Ray:
    """The hosts of one placement; see Scheduler."""

    def __init__(self, placement: Placement) -> None:
        self.placement, self.table = placement, placement.table
        self._ray: Any = None

    @property
    def ray(self) -> Any:
        """The module `ray`, connected. Raises ConfigError."""
        if self._ray is None:
            self._ray = _connected(self.table.address)
        return self._ray

    def text(self) -> str:
        """The placement group and each Ray actor, as Ray gets them."""
        if self.table.most_hosts and self.table.most_hosts < self.table.actor.hosts:
            raise ConfigError("[ray] most_hosts must be at least actor's hosts, or left out")
        text = {
            "placement_group": {**self._place(), "wait_s": self.table.wait_s},
            "actors": [
                {"name": self._name(group.name, index), **self._options(group)}
                for group in self.placement.groups
                for index in range(group.hosts)
            ],
        }
        return json.dumps(text, indent=2) + "\n"

    def submit(self) -> dict[str, Any]:
        """Wait for room for replay and learner, then create all Ray actors."""
        util = self.ray.util
        place = util.placement_group(**self._place())
        if not place.wait(self.table.wait_s):
            missing = "; ".join(self._missing(group) for group in self.placement.groups[:-1])
            util.remove_placement_group(place)
            raise ZapexError(
                f"Ray had no room for replay and learner within {self.table.wait_s} s: {missing}"
            )
        strategies = import_module("ray.util.scheduling_strategies")
        for bundle, (group, index) in enumerate(self._placed()):
            within = strategies.PlacementGroupSchedulingStrategy(place, bundle)
            self._create(group, index, scheduling_strategy=within)
        actors = self.placement.groups[-1]
        for index in range(actors.hosts):
            self._create(actors, index)
        self._serve()
        return {"address": self.table.address}

    def _place(self) -> dict[str, Any]:
        """The placement group."""
        return {
            "name": self.placement.name,
            "strategy": "PACK",
            "lifetime": "detached",
            "bundles": [self._bundle(group) for group, _ in self._placed()],
        }

    def _placed(self) -> list[tuple[Group, int]]:
        """The hosts in the placement group: replays and learner."""
        return [(group, i) for group in self.placement.groups[:-1] for i in range(group.hosts)]

    def _bundle(self, group: Group) -> dict[str, float]:
        asked = {"CPU": group.cores, "memory": group.memory_gb << 30, "GPU": group.gpus}
        return {what: n for what, n in asked.items() if n}

    def _options(self, group: Group) -> dict[str, Any]:
        asked = {"num_cpus": group.cores, "num_gpus": group.gpus, "memory": group.memory_gb << 30}
        return {**asked, "max_restarts": -1, "max_task_retries": 0, "lifetime": "detached"}

    def _name(self, role: str, index: int) -> str:
        return f"{self.placement.name}/{role}/{index}"

    def _create(self, group: Group, index: int, **more: Any) -> None:
        options = {**self._options(group), **more, "name": self._name(group.name, index)}
        self.ray.remote(RayHost).options(**options).remote(group.name, index)

    def _hosts(self) -> Iterator[tuple[str, int, Any]]:
        """Role, index and handle of each Ray actor of the run."""
        for name in sorted(self.ray.util.list_named_actors()):
            run, role, index = f"{name}//".split("/")[:3]  # other programs' names have any form
            if run == self.placement.name:
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    yield role, int(index), self.ray.get_actor(name)

    def _answer(self, reference: Any) -> Any:
        """A host's answer; None while Ray starts it, or starts it again."""
        try:
            return self.ray.get(reference, timeout=_ANSWER_S)
        except (self.ray.exceptions.GetTimeoutError, self.ray.exceptions.RayActorError):
            return None

    def _serve(self) -> list[tuple[str, int, dict[str, Any] | None]]:
        """Query every host; give keys to those without, and the replay's address to all."""
        asked = [(role, i, host, host.poll.remote()) for role, i, host in self._hosts()]
        found = [(role, i, host, self._answer(reference)) for role, i, host, reference in asked]
        for role, _, host, state in found:
            if state is not None and state["state"] == _NO_KEYS:
                self._answer(host.start.remote(self._sealed(role, state["public"])))
        urls = {i: s["url"] for role, i, _, s in found if role == "replay" and s and s["url"]}
        url = ",".join(urls[i] for i in sorted(urls)) if len(urls) == self.table.shards else ""
        for role, _, host, state in found:
            if url and role != "replay" and state is not None and state["url"] != url:
                self._answer(host.replay_is_at.remote(url))
        return [(role, i, state) for role, i, _, state in found]

    def _sealed(self, role: str, public: bytes) -> bytes:
        """What a host needs, keys included; only the process that made `public` can read it."""
        from nacl.public import PublicKey, SealedBox

        keys = self.placement.directory / KEYS
        names = f"{KEY_OF[role]}.key", "public.json"
        needed = {
            "settings": self.placement.settings,
            "facts": self.placement.facts(runs=str(self.placement.directory)),
            "keys": {name: (keys / name).read_text(encoding="utf-8") for name in names},
        }
        return bytes(SealedBox(PublicKey(public)).encrypt(json.dumps(needed).encode()))

    def watch(self, ids: Mapping[str, Any]) -> int:
        """Serve the hosts until the run is over, or Ctrl-C. Returns the exit code."""
        grow_s, began_s = 0.0, time.monotonic()
        try:
            while True:
                states = self._serve()
                for role, index, state in states:
                    if state is None or state["code"] is None:
                        continue
                    if state["code"]:
                        print(f"{role} {index} has ended: zapex logs {role} {self.placement.name}")
                        return 1
                    if state["ends"]:
                        print("the run is over", flush=True)
                        self.stop(ids, _ANSWER_S)
                        return 0
                if not states and time.monotonic() - began_s > _GROW_S:
                    raise ZapexError(
                        f"Ray has no hosts of {self.placement.name}: the run was stopped, or Ray's "
                        "head was lost, and with it all of Ray's nodes; launch the run again (the "
                        "learner's directory has its checkpoints)"
                    )
                if time.monotonic() >= grow_s:
                    grow_s = time.monotonic() + _GROW_S
                    self._grow(states)
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            name = self.placement.name
            print(f"the run continues; to watch it again: zapex launch --attach {name}")
            return 0

    def _grow(self, states: list[tuple[str, int, Any]]) -> None:
        """Add one actor host if the cluster has room. (Ray itself restarts those that are lost.)"""
        actors = self.placement.groups[-1]
        there = {index: state for role, index, state in states if role == actors.name}
        free = self.ray.available_resources()
        fits = all(free.get(what, 0) >= n for what, n in self._bundle(actors).items())
        if fits and all(there.values()) and len(there) < self.table.most_hosts:
            index = next(i for i in range(self.table.most_hosts) if i not in there)
            self._create(actors, index)

    def states(self, ids: Mapping[str, Any]) -> list[Host]:
        """Every Ray actor of the run; running hosts get what they need."""
        hosts = []
        for role, index, state in self._serve():
            if state is None:
                why = self._missing(self.placement.group(role))
                hosts.append(Host(role, index, "pending", why=why))
            elif state["code"] is not None:
                hosts.append(Host(role, index, "over", state["node"], f"exit {state['code']}"))
            else:
                hosts.append(Host(role, index, "running", state["node"], state["state"]))
        return hosts

    def _missing(self, group: Group) -> str:
        total, free = self.ray.cluster_resources(), self.ray.available_resources()
        return f"{group.name} asks for " + ", ".join(
            f"{_shown(what, n)} (Ray has {_shown(what, total.get(what, 0))}, "
            f"{_shown(what, free.get(what, 0))} free)"
            for what, n in self._bundle(group).items()
        )

    def log(self, ids: Mapping[str, Any], role: str, lines: int) -> str:
        """The last lines of each host of the role."""
        return "\n".join(
            f"--- {role} {index}\n{self._answer(host.tail.remote(lines)) or '(no answer)'}"
            for found, index, host in self._hosts()
            if found == role
        )

    def stop(self, ids: Mapping[str, Any], grace_s: float) -> None:
        """End the learner, which saves first, then the others; remove the run from Ray."""
        hosts = list(self._hosts())
        ends = self.placement.learner.name
        for first in (True, False):
            stopping = [
                host.stop.remote(grace_s) for role, _, host in hosts if (role == ends) == first
            ]
            for reference in stopping:
                with contextlib.suppress(
                    self.ray.exceptions.GetTimeoutError, self.ray.exceptions.RayActorError
                ):
                    self.ray.get(reference, timeout=grace_s + _ANSWER_S)
        for _, _, host in hosts:
            self.ray.kill(host)
        util = self.ray.util
        with contextlib.suppress(ValueError):
            util.remove_placement_group(util.get_placement_group(self.placement.name))


class RayHost:
    """The Ray actor of one host: it starts the host's process as a child, which never outlives it.

    When Ray creates it, also again elsewhere, it waits to be given its keys. They arrive sealed for
    a key pair that never leaves this process: Ray's messages, object store and logs never have them
    in the clear.
    """

    def __init__(self, role: str, index: int) -> None:
        from nacl.public import PrivateKey

        self.role, self.index = role, index
        self._private = PrivateKey.generate()
        self._home: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._facts: dict[str, Any] = {}

    def start(self, sealed: bytes) -> None:
        """Write settings and keys into a directory of mode 0700, and start the host."""
        from nacl.public import SealedBox

        if self._child is not None:
            return
        given = json.loads(SealedBox(self._private).decrypt(sealed))
        home = Path(tempfile.mkdtemp(prefix="zapex-"))  # its mode is 0700
        (home / KEYS).mkdir(mode=0o700)
        facts = given["facts"] | {"advertise": _own_address()}
        replace_whole(home / SETTINGS, [given["settings"].encode()])
        replace_whole(home / FACTS, [json.dumps(facts).encode()])
        for name, text in given["keys"].items():
            descriptor = os.open(home / KEYS / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        logs = Path(facts["runs"]) / "logs"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The child dies with this thread, which is the main one: Ray runs a plain actor there.
        with (logs / f"{self.role}-{self.index}.host").open("ab") as output:
            self._child = subprocess.Popen(
                [*host_words(home, self.role), str(self.index)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            )
        self._home, self._facts = home, facts

    def replay_is_at(self, url: str) -> None:
        """The replay's address, or those of all shards with commas; may change."""
        if self._home is not None:
            for shard, one in enumerate(url.split(",")):
                replace_whole(self._home / url_name(shard), [f"{one}\n".encode()])

    def poll(self) -> dict[str, Any]:
        """This host's state. code: the exit code of a child that has ended, else None."""
        return {
            "state": "working" if self._child is not None else _NO_KEYS,
            "public": bytes(self._private.public_key),
            "code": self._child.poll() if self._child is not None else None,
            "ends": self._facts.get("ends") == self.role,
            "url": self._url(),
            "node": _own_address(),
        }

    def _url(self) -> str:
        if self._home is None:
            return ""
        if self.role != "replay":
            return published(self._home, self._facts)
        try:
            return read_text(self._home / url_name(self.index)).strip()
        except ConfigError:
            return ""

    def tail(self, lines: int) -> str:
        """The last lines that the command printed."""
        try:
            log = (self._home or Path()) / "logs" / f"{self.role}-{self.index}.log"
            with log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(it has not printed anything)"

    def stop(self, grace_s: float) -> None:
        """End the child with SIGTERM, or with SIGKILL after `grace_s`."""
        if self._child is not None and self._home is not None:
            replace_whole(self._home / OVER, [b"stopped\n"])
            self._child.send_signal(signal.SIGTERM)
            try:
                self._child.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait(grace_s)
            shutil.rmtree(self._home, ignore_errors=True)


def _connected(address: str) -> Any:
    """The module `ray`, connected to the cluster at `address`. Raises ConfigError."""
    try:
        ray = import_module("ray")
        import_module("nacl.public")
    except ModuleNotFoundError as error:
        raise ConfigError(f'this needs {error.name}: pip install "zapex[ray]"') from None
    if not ray.is_initialized():
        host, _, port = address.rpartition("://")[2].rpartition(":")
        if port.isdigit():  # else "auto". Ray itself would try for minutes.
            try:
                socket.create_connection((host, int(port)), _ANSWER_S).close()
            except OSError as error:
                raise ConfigError(
                    f"[ray] address {address}: Ray's head does not answer ({error}). If it was "
                    "lost, Ray ends all its nodes after a minute, and the run with them: launch it "
                    "again"
                ) from None
        try:
            ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"[ray] address {address}: {error}") from None
    return ray


def _own_address() -> str:
    return str(import_module("ray.util").get_node_ip_address())


def _shown(what: str, n: float) -> str:
    return f"{n / (1 << 30):.0f} GiB" if what == "memory" else f"{n:g} {what}"
