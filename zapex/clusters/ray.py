"""Ray: a placement group for replay and learner, and a Ray actor for each host.

A Ray actor (RayHost) starts the ordinary command as a child. It outlives the process that launched
it, and Ray restarts it elsewhere when its node is lost. The launching process watches: it gives
each host its keys, and adds actor hosts as the cluster grows. Experience never passes through Ray.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from zapex.clusters.host import (
    FACTS,
    KEYS,
    OVER,
    SETTINGS,
    Group,
    host_words,
    publish,
    published,
    tail,
)
from zapex.clusters.placement import KEY_OF, Host, Launched
from zapex.errors import ConfigError, ZapexError
from zapex.machine.child import PARENT_VARIABLE
from zapex.machine.disk import replace_whole

NAMESPACE = "zapex"
_LOOK_S = 1.0
_GROW_S = 5.0
_ANSWER_S = 5.0
_NO_KEYS = "waiting for keys"


class Ray(Launched):
    """The hosts of one placement."""

    @cached_property
    def ray(self) -> Any:
        """The module `ray`, connected. Raises ConfigError."""
        return _connected(self.table.address)

    def text(self) -> str:
        """The placement group and each Ray actor, as Ray gets them."""
        if self.table.most_hosts and self.table.most_hosts < self.table.actor.hosts:
            raise ConfigError("[ray] most_hosts must be at least actor's hosts, or left out")
        text = {
            "placement_group": {**self._place(), "wait_s": self.table.wait_s},
            "actors": [
                {"name": self._name(group.name, index), **_options(group)}
                for group in self.placement.groups.values()
                for index in range(group.hosts)
            ],
        }
        return json.dumps(text, indent=2) + "\n"

    def submit(self) -> dict[str, Any]:
        """Wait for room for replay and learner, then create all Ray actors."""
        util = self.ray.util
        place = util.placement_group(**self._place())
        if not place.wait(self.table.wait_s):
            missing = "; ".join(self._missing(group) for group in self._first)
            util.remove_placement_group(place)
            raise ZapexError(
                f"Ray had no room for replay and learner within {self.table.wait_s} s: {missing}"
            )
        strategies = import_module("ray.util.scheduling_strategies")
        placed = [(group, index) for group in self._first for index in range(group.hosts)]
        for bundle, (group, index) in enumerate(placed):
            within = strategies.PlacementGroupSchedulingStrategy(place, bundle)
            self._create(group, index, scheduling_strategy=within)
        actors = self.placement.group("actor")
        for index in range(actors.hosts):
            self._create(actors, index)
        self._serve()
        return {"address": self.table.address}

    @property
    def _first(self) -> list[Group]:
        """The groups in the placement group: replay and learner."""
        return [group for group in self.placement.groups.values() if group.name != "actor"]

    def _place(self) -> dict[str, Any]:
        """The placement group."""
        return {
            "name": self.placement.name,
            "strategy": "PACK",
            "lifetime": "detached",
            "bundles": [_bundle(group) for group in self._first for _ in range(group.hosts)],
        }

    def _name(self, role: str, index: int) -> str:
        return f"{self.placement.name}/{role}/{index}"

    def _create(self, group: Group, index: int, **more: Any) -> None:
        options = {**_options(group), **more, "name": self._name(group.name, index)}
        self.ray.remote(RayHost).options(**options).remote(group.name, index)

    def _hosts(self) -> Iterator[tuple[str, int, Any]]:
        """Role, index and handle of each Ray actor of the run."""
        for name in sorted(self.ray.util.list_named_actors()):
            run, role, index = f"{name}//".split("/")[:3]  # other programs' names have any form
            if run == self.placement.name:
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    yield role, int(index), self.ray.get_actor(name)

    def _answer(self, reference: Any, timeout_s: float = _ANSWER_S) -> Any:
        """A host's answer; None while Ray starts it, or starts it again."""
        try:
            return self.ray.get(reference, timeout=timeout_s)
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

        keys = self.directory / KEYS
        names = f"{KEY_OF[role]}.key", "public.json"
        placement = dataclasses.replace(self.placement, runs=str(self.directory))
        needed = {
            "settings": self.settings,
            "facts": dataclasses.asdict(placement),
            "keys": {name: (keys / name).read_text(encoding="utf-8") for name in names},
        }
        return bytes(SealedBox(PublicKey(public)).encrypt(json.dumps(needed).encode()))

    def watch(self) -> int:
        """Serve the hosts until the run is over, or Ctrl-C. Returns the exit code."""
        grow_s, began_s, name = 0.0, time.monotonic(), self.placement.name
        try:
            while True:
                states = self._serve()
                for role, index, state in states:
                    if state is None or state["code"] is None:
                        continue
                    if state["code"]:
                        print(f"{role} {index} has ended: zapex logs {role} {name}")
                        return 1
                    if role == self.placement.ends:
                        print("the run is over", flush=True)
                        self.stop(_ANSWER_S)
                        return 0
                if not states and time.monotonic() - began_s > _GROW_S:
                    raise ZapexError(
                        f"Ray has no hosts of {name}: the run was stopped, or Ray's head was lost, "
                        "and with it all of Ray's nodes; launch the run again (the learner's "
                        "directory has its checkpoints)"
                    )
                if time.monotonic() >= grow_s:
                    grow_s = time.monotonic() + _GROW_S
                    self._grow(states)
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            print(f"the run continues; to watch it again: zapex launch --attach {name}")
            return 0

    def _grow(self, states: list[tuple[str, int, Any]]) -> None:
        """Add one actor host if the cluster has room. (Ray itself restarts those that are lost.)"""
        actors = self.placement.group("actor")
        there = {index: state for role, index, state in states if role == actors.name}
        free = self.ray.available_resources()
        fits = all(free.get(what, 0) >= n for what, n in _bundle(actors).items())
        if fits and all(there.values()) and len(there) < self.table.most_hosts:
            index = next(i for i in range(self.table.most_hosts) if i not in there)
            self._create(actors, index)

    def states(self) -> list[Host]:
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
            for what, n in _bundle(group).items()
        )

    def log(self, role: str, lines: int = 50) -> str:
        """The last lines of each host of the role."""
        self.placement.group(role)
        return "\n".join(
            f"--- {role} {index}\n{self._answer(host.tail.remote(lines)) or '(no answer)'}"
            for found, index, host in self._hosts()
            if found == role
        )

    def _stop(self, grace_s: float) -> None:
        """End the learner, which saves first, then the others; remove the run from Ray."""
        hosts = list(self._hosts())
        for first in (True, False):
            roles = [host for role, _, host in hosts if (role == self.placement.ends) == first]
            for reference in [host.stop.remote(grace_s) for host in roles]:
                self._answer(reference, grace_s + _ANSWER_S)
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
        self._home = Path(tempfile.mkdtemp(prefix="zapex-"))  # its mode is 0700
        self._log = self._home / "logs" / f"{role}-{index}.log"
        self._child: subprocess.Popen[bytes] | None = None
        self._shards = 1

    def start(self, sealed: bytes) -> None:
        """Write settings and keys, and start the host."""
        from nacl.public import SealedBox

        if self._child is not None:
            return
        given = json.loads(SealedBox(self._private).decrypt(sealed))
        facts = given["facts"] | {"advertise": _own_address()}
        self._shards = facts["shards"]
        replace_whole(self._home / SETTINGS, [given["settings"].encode()])
        replace_whole(self._home / FACTS, [json.dumps(facts).encode()])
        (self._home / KEYS).mkdir(mode=0o700)
        for name, text in given["keys"].items():
            path = self._home / KEYS / name
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        logs = Path(facts["runs"]) / "logs"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The child dies with this thread, which is the main one: Ray runs a plain actor there.
        with (logs / f"{self.role}-{self.index}.host").open("ab") as output:
            self._child = subprocess.Popen(
                [*host_words(self._home, self.role), str(self.index)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            )

    def replay_is_at(self, url: str) -> None:
        """The replay's address, or those of all shards with commas; may change."""
        for shard, one in enumerate(url.split(",")):
            publish(self._home, shard, one)

    def poll(self) -> dict[str, Any]:
        """This host's state. code: the exit code of a child that has ended, else None."""
        own = self.role == "replay"  # of the replay's addresses a shard knows its own
        return {
            "state": "working" if self._child is not None else _NO_KEYS,
            "public": bytes(self._private.public_key),
            "code": self._child.poll() if self._child is not None else None,
            "url": published(self._home, 1, self.index)
            if own
            else published(self._home, self._shards),
            "node": _own_address(),
        }

    def tail(self, lines: int) -> str:
        """The last lines that the command printed."""
        try:
            return tail(self._log, lines)
        except OSError:
            return "(it has not printed anything)"

    def stop(self, grace_s: float) -> None:
        """End the child with SIGTERM, or with SIGKILL after `grace_s`."""
        if self._child is not None:
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


def _bundle(group: Group) -> dict[str, float]:
    asked = {"CPU": group.cores, "memory": group.memory_gb << 30, "GPU": group.gpus}
    return {what: n for what, n in asked.items() if n}


def _options(group: Group) -> dict[str, Any]:
    asked = {"num_cpus": group.cores, "num_gpus": group.gpus, "memory": group.memory_gb << 30}
    return {**asked, "max_restarts": -1, "max_task_retries": 0, "lifetime": "detached"}


def _own_address() -> str:
    return str(import_module("ray.util").get_node_ip_address())


def _shown(what: str, n: float) -> str:
    return f"{n / (1 << 30):.0f} GiB" if what == "memory" else f"{n:g} {what}"
