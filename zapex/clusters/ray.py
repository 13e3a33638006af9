"""Ray: a placement group for replay and learner, a Ray actor for each host.

A Ray actor (clusters/ray_host.py) starts the ordinary command as a child. It outlives the process
that launched it, and Ray makes it again elsewhere when its node is lost. That process watches: it
gives each host its keys, and follows the size of the cluster. Experience never passes through Ray.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from zapex.clusters.host import KEYS, SETTINGS
from zapex.clusters.placement import Group, Host, Placement
from zapex.clusters.ray_head import connected
from zapex.errors import ConfigError, ZapexError

NAMESPACE = "zapex"
_LOOK_S = 1.0
_GROW_S = 5.0
_ASK_S = 5.0
_KEYS_OF = {"replay": "replay", "learner": "learner", "actor": "relay"}


class Ray:
    """The hosts of one placement; see Adapter."""

    def __init__(self, placement: Placement) -> None:
        self.placement, self.table = placement, placement.table
        self._urls: dict[str, str] = {}
        self._ray: Any = None

    @property
    def ray(self) -> Any:
        """Ray, connected. Raises ConfigError."""
        if self._ray is None:
            self._ray = connected(self.table.address, NAMESPACE)
        return self._ray

    def _options(self, group: Group) -> dict[str, Any]:
        asked = {"num_cpus": group.cores, "num_gpus": group.gpus, "memory": group.memory_gb << 30}
        return {**asked, "max_restarts": -1, "max_task_retries": 0, "lifetime": "detached"}

    def _bundle(self, group: Group) -> dict[str, float]:
        asked = {"CPU": group.cores, "memory": group.memory_gb << 30, "GPU": group.gpus}
        return {what: n for what, n in asked.items() if n}

    def text(self) -> str:
        """The placement group and each Ray actor, as Ray gets them."""
        if self.table.most_hosts and self.table.most_hosts < self.table.actor.hosts:
            raise ConfigError("[ray] most_hosts must be at least actor's hosts, or left out")
        text = {
            "placement_group": {
                "name": self.placement.name, "strategy": "PACK", "lifetime": "detached",
                "bundles": [self._bundle(group) for group, _ in self._first()],
                "wait_s": self.table.wait_s,
            },
            "actors": [
                {"name": self._name(group.name, i), **self._options(group)}
                for group in self.placement.groups for i in range(group.hosts)
            ],
        }  # fmt: skip
        return json.dumps(text, indent=2) + "\n"

    def submit(self) -> dict[str, Any]:
        """Wait for the place of replay and learner; then make all Ray actors."""
        first, actors = self._first(), self.placement.groups[-1]
        groups = self.ray.util
        place = groups.placement_group(
            [self._bundle(group) for group, _ in first], strategy="PACK", lifetime="detached",
            name=self.placement.name,
        )  # fmt: skip
        if not place.wait(self.table.wait_s):
            missing = "; ".join(self._missing(group) for group in self.placement.groups[:-1])
            groups.remove_placement_group(place)
            raise ZapexError(
                f"Ray had no place for replay and learner within {self.table.wait_s} s: {missing}"
            )
        strategies = import_module("ray.util.scheduling_strategies")
        for bundle, (group, index) in enumerate(first):
            within = strategies.PlacementGroupSchedulingStrategy(place, bundle)
            self._make(group, index, scheduling_strategy=within)
        for index in range(actors.hosts):
            self._make(actors, index)
        self._serve()
        return {"address": self.table.address}

    def _first(self) -> list[tuple[Group, int]]:
        """The hosts of the placement group: replays and learner."""
        return [(group, i) for group in self.placement.groups[:-1] for i in range(group.hosts)]

    def _make(self, group: Group, index: int, **more: Any) -> None:
        from zapex.clusters.ray_host import RayHost

        options = {**self._options(group), **more, "name": self._name(group.name, index)}
        self.ray.remote(RayHost).options(**options).remote(group.name, index)

    def _name(self, role: str, index: int) -> str:
        return f"{self.placement.name}/{role}/{index}"

    def _hosts(self) -> Iterator[tuple[str, int, Any]]:
        """Role, index and handle of each Ray actor of the run."""
        for name in sorted(self.ray.util.list_named_actors()):
            run, role, index = f"{name}//".split("/")[:3]  # others name theirs as they like
            if run == self.placement.name:
                try:
                    yield role, int(index), self.ray.get_actor(name)
                except ValueError:  # it has ended in between
                    continue

    def _ask(self, reference: Any) -> Any:
        """The answer of a host; None if Ray is starting it, or starting it again."""
        try:
            return self.ray.get(reference, timeout=_ASK_S)
        except (self.ray.exceptions.GetTimeoutError, self.ray.exceptions.RayActorError):
            return None

    def _serve(self) -> list[tuple[str, int, dict[str, Any] | None]]:
        """Ask every host; give keys to those that have none, and the replay's address to all."""
        asked = [(role, i, host, host.poll.remote()) for role, i, host in self._hosts()]
        found = [(role, i, host, self._ask(reference)) for role, i, host, reference in asked]
        for role, _, host, state in found:
            if state is not None and state["state"] == "waiting for keys":
                self._ask(host.start.remote(self._sealed(role, state["public"])))
        urls = {i: s["url"] for role, i, _, s in found if role == "replay" and s and s["url"]}
        url = ",".join(urls[i] for i in sorted(urls)) if len(urls) == self.table.shards else ""
        for role, _, host, state in found:
            if url and role != "replay" and state is not None and state["url"] != url:
                self._ask(host.replay_is_at.remote(url))
        return [(role, i, state) for role, i, _, state in found]

    def _sealed(self, role: str, public: bytes) -> bytes:
        """What a host needs, keys included: only the process that made `public` can read it."""
        from nacl.public import PublicKey, SealedBox

        keys = self.placement.directory / KEYS
        names = f"{_KEYS_OF[role]}.key", "public.json"
        told = {
            "settings": {SETTINGS: self.placement.settings},
            "facts": self.placement.facts(runs=str(self.placement.directory)),
            "keys": {name: (keys / name).read_text(encoding="utf-8") for name in names},
        }
        return bytes(SealedBox(PublicKey(public)).encrypt(json.dumps(told).encode()))

    def watch(self, ids: Mapping[str, Any]) -> int:
        """Until the run is over, or Ctrl-C, after which it goes on. Returns the exit code."""
        grow_s, began_s = 0.0, time.monotonic()
        try:
            while True:
                states = self._serve()
                for role, index, state in states:
                    if state is None or state["code"] is None:
                        continue
                    if state["code"] == 0 and state["ends"]:
                        print("the run is over", flush=True)
                        self.stop(ids, _ASK_S)
                        return 0
                    if state["code"]:
                        print(f"{role} {index} has ended: zapex logs {role} {self.placement.name}")
                        return 1
                if not states and time.monotonic() - began_s > _GROW_S:
                    raise ZapexError(
                        f"Ray has no hosts of {self.placement.name}: the run was stopped, or Ray's "
                        "head was lost, with which Ray ends all its nodes; launch it again, and "
                        "the learner's directory has its checkpoints"
                    )
                if time.monotonic() >= grow_s:
                    grow_s = time.monotonic() + _GROW_S
                    self._grow(states)
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            print(f"the run goes on; to watch again: zapex launch --attach {self.placement.name}")
            return 0

    def _grow(self, states: list[tuple[str, int, Any]]) -> None:
        """One more actor host where the cluster has room; a lost one comes back by Ray itself."""
        actors = self.placement.groups[-1]
        there = {index: state for role, index, state in states if role == actors.name}
        free = self.ray.available_resources()
        fits = all(free.get(what, 0) >= n for what, n in self._bundle(actors).items())
        if fits and all(there.values()) and len(there) < self.table.most_hosts:
            self._make(actors, next(i for i in range(self.table.most_hosts) if i not in there))

    def states(self, ids: Mapping[str, Any]) -> list[Host]:
        """Every Ray actor of the run; hosts that are running get what they need."""
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
        asked = self._bundle(group)
        return f"{group.name} asks for " + ", ".join(
            f"{_shown(what, n)} (Ray has {_shown(what, total.get(what, 0))}, "
            f"{_shown(what, free.get(what, 0))} free)"
            for what, n in asked.items()
        )

    def log(self, ids: Mapping[str, Any], role: str, lines: int) -> str:
        """The last lines of each host of the role."""
        texts = []
        for found, index, host in self._hosts():
            if found == role:
                said = self._ask(host.tail.remote(lines)) or "(no answer)"
                texts.append(f"--- {role} {index}\n{said}")
        return "\n".join(texts)

    def stop(self, ids: Mapping[str, Any], grace_s: float) -> None:
        """The learner saves and ends, then the others; then nothing of the run is left in Ray."""
        found = list(self._hosts())
        ends = next(group.name for group in self.placement.groups if group.part.learns)
        for last in (False, True):
            stopping = [
                host.stop.remote(grace_s) for role, _, host in found if (role != ends) == last
            ]
            for reference in stopping:
                try:
                    self.ray.get(reference, timeout=grace_s + _ASK_S)
                except (self.ray.exceptions.GetTimeoutError, self.ray.exceptions.RayActorError):
                    continue
        for _, _, host in found:
            self.ray.kill(host)
        util = self.ray.util
        with contextlib.suppress(ValueError):
            util.remove_placement_group(util.get_placement_group(self.placement.name))


def _shown(what: str, n: float) -> str:
    return f"{n / (1 << 30):.0f} GiB" if what == "memory" else f"{n:g} {what}"
