"""Kubernetes: a StatefulSet for the replay, indexed Jobs for learner and actors, Secrets for keys.

A Job replaces a lost pod, and `--resume auto` continues from the learner's volume. The objects are
JSON, which kubectl takes as YAML; keys go to kubectl through a pipe, never on a command line.
"""

import base64
import dataclasses
import importlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zapex.clusters.host import FACTS, KEYS, OVER, SETTINGS, Group, Placement
from zapex.clusters.placement import KEY_OF, Host, Launched, tool
from zapex.errors import ConfigError
from zapex.net.addresses import DEFAULT_PORT

VERSIONS = ("1.29", "1.33")
"""Versions of the API that the objects are checked against."""
_HOME, _RUNS = "/zapex/home", "/runs"
_USER = 1000
_INDEX, _POD = "batch.kubernetes.io/job-completion-index", "apps.kubernetes.io/pod-index"
_ROLE = "app.kubernetes.io/component"
_LIST = {"apiVersion": "v1", "kind": "List"}
_CONFINED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": _USER,
    "runAsGroup": _USER,
    "fsGroup": _USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_FAILURE_RULES: list[Any] = [
    # A pod that the cluster evicts has not failed; settings that cannot work always fail.
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
]


class Kubernetes(Launched):
    """The objects of one placement."""

    def __init__(self, placement: Placement, directory: Path, settings: str) -> None:
        super().__init__(placement, directory, settings)
        self.name = f"zapex-{placement.name}"
        self.port = self.table.port or DEFAULT_PORT
        self.chosen = f"--selector=app.kubernetes.io/instance={self.name}"

    def objects(self, keys: Path | None) -> list[dict[str, Any]]:
        """Every object. keys: the directory of the keys; None: without them."""
        place = f"{self.name}-replay.{self.table.namespace}.svc:{self.port}"
        urls = [f"tcp://{self.name}-replay-{i}.{place}" for i in range(self.table.shards)]
        placement = dataclasses.replace(
            self.placement,
            url=",".join(urls),
            runs=_RUNS,
            echo=True,
            stays="replay",
            port=self.port,
        )
        facts = json.dumps(dataclasses.asdict(placement), indent=2)
        texts = {SETTINGS: self.settings, FACTS: facts}
        config = self._object("v1", "ConfigMap", "settings", data=texts)
        groups = self.placement.groups.values()
        return [config, *(one for group in groups for one in self._of(group, keys))]

    def _of(self, group: Group, keys: Path | None) -> list[dict[str, Any]]:
        """The objects of a group of hosts."""
        role = group.name
        objects = [self._secret(role, keys)]
        spec: dict[str, Any]
        if role == "replay":
            kind, version = "StatefulSet", "apps/v1"
            service = {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "ports": [{"name": "zapex", "port": self.port}],
                "selector": self._labels(role),
            }
            objects.append(self._object("v1", "Service", role, spec=service))
            spec = {
                "serviceName": f"{self.name}-{role}",
                "replicas": group.hosts,
                "selector": {"matchLabels": self._labels(role)},
                "podManagementPolicy": "Parallel",
            }
        else:
            kind, version = "Job", "batch/v1"
            spec = {
                "completionMode": "Indexed",
                "completions": group.hosts,
                "parallelism": group.hosts,
                "backoffLimit": 1000,
                "podFailurePolicy": {"rules": _FAILURE_RULES},
            }
        if group.learns:
            claim = {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": f"{self.table.storage_gb}Gi"}},
                "storageClassName": self.table.storage_class or None,
            }
            objects.append(self._object("v1", "PersistentVolumeClaim", "runs", spec=claim))
        pod = {"metadata": {"labels": self._labels(role)}, "spec": self._pod(group, kind)}
        return [*objects, self._object(version, kind, role, spec={**spec, "template": pod})]

    def _secret(self, role: str, keys: Path | None) -> dict[str, Any]:
        """A role's own key and the public keys."""
        names = f"{KEY_OF[role]}.key", "public.json"
        texts = {n: (keys / n).read_bytes() if keys else b"created at submission" for n in names}
        data = {name: base64.b64encode(text).decode() for name, text in texts.items()}
        return self._object("v1", "Secret", f"{role}-keys", data=data)

    def _pod(self, group: Group, kind: str) -> dict[str, Any]:
        role, is_set = group.name, kind == "StatefulSet"
        path = f"metadata.labels['{_POD}']" if is_set else f"metadata.annotations['{_INDEX}']"
        index = {"valueFrom": {"fieldRef": {"fieldPath": path}}}
        env = [{"name": "INDEX", **index}, {"name": "XDG_CACHE_HOME", "value": f"{_RUNS}/.cache"}]
        limits: dict[str, Any] = {"cpu": str(group.cores), "memory": f"{group.memory_gb}Gi"}
        if group.gpus:
            limits[self.table.gpu_resource] = str(group.gpus)
        sizes = {"limits": limits, "requests": limits}
        same = {"image": self.table.image, "securityContext": _CONFINED, "resources": sizes}
        host = {
            "name": "zapex",
            "command": ["python", "-P", "-m", "zapex.clusters.host", _HOME, role, "$(INDEX)"],
            "env": env,
            "volumeMounts": _mounts(home="/zapex", runs=_RUNS, tmp="/tmp", shm="/dev/shm"),
            **same,
            **self._probes(role),
        }
        # The files of a Secret belong to root, and a key's owner must be the user that reads it.
        prepare = (
            f"install -d -m 700 {_HOME} {_HOME}/{KEYS} && "
            f"install -m 600 /keys/* {_HOME}/{KEYS}/ && install -m 600 /settings/* {_HOME}/"
        )
        mounts = _mounts(home="/zapex", keys="/keys", settings="/settings")
        first = {"name": "keys", "command": ["sh", "-c", prepare], "volumeMounts": mounts, **same}
        claim = {"persistentVolumeClaim": {"claimName": f"{self.name}-runs"}}
        # zapex's shared memory is in memfds, which count towards the memory limit.
        volumes: dict[str, dict[str, Any]] = {
            "home": {"emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
            "runs": claim if group.learns else {"emptyDir": {}},
            "tmp": {"emptyDir": {}},
            "shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}},
            "keys": {"secret": {"secretName": f"{self.name}-{role}-keys", "defaultMode": 0o440}},
            "settings": {"configMap": {"name": f"{self.name}-settings"}},
        }
        return {
            "automountServiceAccountToken": False,
            "restartPolicy": "Always" if is_set else "Never",
            "terminationGracePeriodSeconds": int(self.placement.grace_s) + 30,
            "securityContext": _POD_SECURITY,
            "initContainers": [first],
            "containers": [host],
            "volumes": [{"name": name, **volume} for name, volume in volumes.items()],
        }

    def _probes(self, role: str) -> dict[str, Any]:
        """Checks that the role has written its snapshot, and that the replay's socket answers."""
        ask = f"python -P -m zapex status --probe {_RUNS}/{role}-$INDEX"
        ask += f" --replay tcp://127.0.0.1:{self.port}" if role == "replay" else ""
        command = ["sh", "-c", f"[ -e {_HOME}/{OVER} ] || exec {ask}"]
        probe = {"exec": {"command": command}, "timeoutSeconds": 20, "periodSeconds": 30}
        probes: dict[str, Any] = {"livenessProbe": {**probe, "failureThreshold": 4}}
        if role == "replay":  # the first start compiles kernels
            probes["startupProbe"] = {**probe, "periodSeconds": 5, "failureThreshold": 120}
            probes["readinessProbe"] = probe
        return probes

    def _labels(self, role: str) -> dict[str, str]:
        instance = {"app.kubernetes.io/instance": self.name, "app.kubernetes.io/name": "zapex"}
        return {**instance, _ROLE: role}

    def _object(self, version: str, kind: str, role: str, **more: Any) -> dict[str, Any]:
        named = {"name": f"{self.name}-{role}", "namespace": self.table.namespace}
        metadata = {**named, "labels": self._labels(role)}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **more}

    def text(self) -> str:
        """A list of the objects, checked against the schemas of two API versions."""
        _validate(objects := self.objects(None))
        return json.dumps({**_LIST, "items": objects}, indent=2) + "\n"

    def submit(self) -> dict[str, Any]:
        """kubectl create, which refuses what exists already."""
        given = json.dumps({**_LIST, "items": self.objects(self.directory / KEYS)})
        # It creates one object after the other: first ask whether all of them would be accepted.
        for how in (["--dry-run=server"], []):
            self._kubectl("create", "--filename=-", *how, given=given)
        return {"namespace": self.table.namespace, "instance": self.name}

    def states(self) -> list[Host]:
        """Pods, and the controllers' reasons for those that they could not create."""
        what = "pods,jobs,statefulsets"
        found = json.loads(self._kubectl("get", what, self.chosen, "--output=json"))["items"]
        # A Job keeps its former pods: the newest of each index counts.
        made = [_host_of(one) for one in found if one["kind"] == "Pod"]
        hosts = {(h.role, h.index): h for h in sorted(made, key=lambda host: -host.waited_s)}
        for role in (one["metadata"]["labels"][_ROLE] for one in found if one["kind"] != "Pod"):
            wanted = range(self.placement.group(role).hosts)
            missing = [i for i in wanted if (role, i) not in hosts]
            why = self._refused(role) if missing else ""
            hosts |= {(role, i): Host(role, i, "pending", why=why) for i in missing}
        return [hosts[place] for place in sorted(hosts)]

    def _refused(self, role: str) -> str:
        """Why no pod was created, e.g. a quota; "": none was refused."""
        chosen = f"involvedObject.name={self.name}-{role},type=Warning"
        words = "get", "events", f"--field-selector={chosen}", "--output=json"
        events = json.loads(self._kubectl(*words))["items"]
        return str(events[-1].get("message", "")) if events else ""

    def log(self, role: str, lines: int = 50) -> str:
        """kubectl logs of each pod of the role."""
        self.placement.group(role)
        chosen = f"{self.chosen},{_ROLE}={role}"
        how = (f"--tail={lines}", "--container=zapex", "--prefix", "--ignore-errors")
        return self._kubectl("logs", chosen, "--max-log-requests=50", *how)

    def _stop(self, grace_s: float) -> None:
        """Delete the learner, which saves first, then all other objects except its volume."""
        learner = self.placement.ends
        first = f"{'statefulset' if learner == 'replay' else 'job'}/{self.name}-{learner}"
        how = ("--ignore-not-found", "--cascade=foreground", f"--timeout={grace_s:g}s")
        self._kubectl("delete", first, *how, timeout_s=grace_s + 30)
        kinds = "jobs,statefulsets,services,configmaps,secrets"
        self._kubectl("delete", kinds, self.chosen, *how, timeout_s=grace_s + 30)

    def _kubectl(self, *words: str, given: str = "", timeout_s: float = 60.0) -> str:
        space = f"--namespace={self.table.namespace}"
        return tool("kubectl", *words, space, given=given, timeout_s=timeout_s)


def _mounts(**paths: str) -> list[dict[str, str]]:
    return [{"name": name, "mountPath": path} for name, path in paths.items()]


def _validate(objects: list[dict[str, Any]]) -> None:
    """Raise ConfigError for an object that does not fit the API's schema."""
    try:
        schemas = importlib.import_module("kubernetes_validate")
    except ModuleNotFoundError:
        return  # an extra; the API server checks the same
    for version in VERSIONS:
        for one in objects:
            try:
                schemas.validate(one, version, strict=True)
            except schemas.ValidationError as error:
                where = f"{one['metadata']['name']} does not fit API {version}"
                raise ConfigError(f"[kubernetes] {one['kind']} {where}: {error}") from None


def _host_of(pod: Mapping[str, Any]) -> Host:
    """A pod as a Host, with Kubernetes' own words for why it waits."""
    labels, status = pod["metadata"]["labels"], pod.get("status", {})
    index = pod["metadata"].get("annotations", {}).get(_INDEX, labels.get(_POD, "0"))
    why = str(status.get("message", ""))
    state = {"Pending": "pending", "Running": "running"}.get(status.get("phase"), "over")
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            why = condition.get("message", "")
    for one in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting = one.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            state, why = "pending", f"{waiting['reason']}: {waiting.get('message', '')}"
        ended = one.get("state", {}).get("terminated")
        if ended and state == "over":
            why = f"{ended.get('reason', '')}, exit code {ended.get('exitCode')}"
    age = datetime.now(UTC) - datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    role, where = labels[_ROLE], pod["spec"].get("nodeName", "")
    return Host(role, int(index), state, where, " ".join(why.split()), age.total_seconds())
