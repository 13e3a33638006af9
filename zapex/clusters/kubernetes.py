"""Kubernetes: a StatefulSet for the replay, indexed Jobs for learner and actors, Secrets for keys.

A Job makes a lost pod again, and `--resume auto` goes on from the learner's volume. The objects are
JSON, which kubectl takes as YAML; keys go to kubectl through a pipe, and never into a command line.
"""

import base64
import importlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zapex.clusters.host import FACTS, KEYS, OVER, SETTINGS
from zapex.clusters.placement import Group, Host, Placement, tool
from zapex.errors import ConfigError
from zapex.net.addresses import DEFAULT_PORT

VERSIONS = ("1.29", "1.33")  # of the API: the objects are checked against both
_HOME, _RUNS = "/zapex/home", "/runs"
_KEYS_OF = {"replay": "replay", "learner": "learner", "actor": "relay"}
_USER = 1000
_INDEX, _POD = "batch.kubernetes.io/job-completion-index", "apps.kubernetes.io/pod-index"
_ROLE = "app.kubernetes.io/component"
_LIST = {"apiVersion": "v1", "kind": "List"}
_TAKEN_AWAY = {"type": "DisruptionTarget", "status": "True"}
_MISTAKE = {"operator": "In", "values": [2]}  # settings that cannot work


class Kubernetes:
    """The objects of one placement; see Adapter."""

    def __init__(self, placement: Placement) -> None:
        self.placement, self.table = placement, placement.table
        self.name = f"zapex-{placement.name}"
        self.port = self.table.port or DEFAULT_PORT
        self.chosen = f"--selector=app.kubernetes.io/instance={self.name}"

    def objects(self, keys: Path | None) -> list[dict[str, Any]]:
        """Every object; keys: their directory, or None for a look at the rest."""
        place = f"{self.name}-replay.{self.table.namespace}.svc:{self.port}"
        urls = [f"tcp://{self.name}-replay-{i}.{place}" for i in range(self.table.shards)]
        facts = self.placement.facts(
            url=",".join(urls), runs=_RUNS, echo=True, stays="replay", port=self.port
        )
        texts = {SETTINGS: self.placement.settings, FACTS: json.dumps(facts, indent=2)}
        config = self._object("v1", "ConfigMap", "settings", data=texts)
        return [config, *(one for group in self.placement.groups for one in self._of(group, keys))]

    def _of(self, group: Group, keys: Path | None) -> list[dict[str, Any]]:
        role = group.name
        made = [self._secret(role, keys)]
        if role == "replay":
            ports = [{"name": "zapex", "port": self.port}]
            service = {"clusterIP": "None", "publishNotReadyAddresses": True, "ports": ports}
            service |= {"selector": self._labels(role)}
            made.append(self._object("v1", "Service", role, spec=service))
            spec = {"serviceName": f"{self.name}-{role}", "replicas": group.hosts}
            chosen = {"matchLabels": self._labels(role)}
            spec |= {"selector": chosen, "podManagementPolicy": "Parallel"}
            kind, version = "StatefulSet", "apps/v1"
        else:
            # A pod that the cluster takes away is no failure; settings that cannot work always are.
            rules: list[Any] = [{"action": "Ignore", "onPodConditions": [_TAKEN_AWAY]}]
            rules += [{"action": "FailJob", "onExitCodes": _MISTAKE}]
            spec = {"completionMode": "Indexed", "completions": group.hosts}
            spec |= {"parallelism": group.hosts, "backoffLimit": 1000}
            spec |= {"podFailurePolicy": {"rules": rules}}
            kind, version = "Job", "batch/v1"
        if group.part.learns:
            size = {"requests": {"storage": f"{self.table.storage_gb}Gi"}}
            claim = {"accessModes": ["ReadWriteOnce"], "resources": size}
            kept = {**claim, "storageClassName": self.table.storage_class or None}
            made.append(self._object("v1", "PersistentVolumeClaim", "runs", spec=kept))
        pod = {"metadata": {"labels": self._labels(role)}, "spec": self._pod(group, kind)}
        return [*made, self._object(version, kind, role, spec={**spec, "template": pod})]

    def _secret(self, role: str, keys: Path | None) -> dict[str, Any]:
        """A role's own key, and the public ones."""
        names = f"{_KEYS_OF[role]}.key", "public.json"
        texts = {n: (keys / n).read_bytes() if keys else b"made at submission" for n in names}
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
        # The files of a Secret belong to root: keys must be those of the user who reads them.
        prepare = (
            f"install -d -m 700 {_HOME} {_HOME}/{KEYS} && "
            f"install -m 600 /keys/* {_HOME}/{KEYS}/ && install -m 600 /settings/* {_HOME}/"
        )
        mounts = _mounts(home="/zapex", keys="/keys", settings="/settings")
        first = {"name": "keys", "command": ["sh", "-c", prepare], "volumeMounts": mounts, **same}
        claim = {"persistentVolumeClaim": {"claimName": f"{self.name}-runs"}}
        # zapex's own shared memory is in memfds, which the limit of memory counts.
        volumes: dict[str, dict[str, Any]] = {
            "home": {"emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
            "runs": claim if group.part.learns else {"emptyDir": {}},
            "tmp": {"emptyDir": {}},
            "shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}},
            "keys": {"secret": {"secretName": f"{self.name}-{role}-keys", "defaultMode": 0o440}},
            "settings": {"configMap": {"name": f"{self.name}-settings"}},
        }
        return {
            "automountServiceAccountToken": False,
            "restartPolicy": "Always" if is_set else "Never",
            "terminationGracePeriodSeconds": int(self.placement.grace_s) + 30,
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "initContainers": [first],
            "containers": [host],
            "volumes": [{"name": name, **volume} for name, volume in volumes.items()],
        }  # fmt: skip

    def _probes(self, role: str) -> dict[str, Any]:
        """They ask the role: what has it written last, and does the replay's socket answer?"""
        ask = f"python -P -m zapex status --probe {_RUNS}/{role}-$INDEX"
        ask += f" --replay tcp://127.0.0.1:{self.port}" if role == "replay" else ""
        command = ["sh", "-c", f"[ -e {_HOME}/{OVER} ] || exec {ask}"]
        probe = {"exec": {"command": command}, "timeoutSeconds": 20, "periodSeconds": 30}
        probes: dict[str, Any] = {"livenessProbe": {**probe, "failureThreshold": 4}}
        if role == "replay":  # kernels are compiled at the first start
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
        """kubectl create; what is there already refuses."""
        given = json.dumps({**_LIST, "items": self.objects(self.placement.directory / KEYS)})
        self._kubectl("create", "--filename=-", given=given)
        return {"namespace": self.table.namespace, "instance": self.name}

    def states(self, ids: Mapping[str, Any]) -> list[Host]:
        """Pods, and what their controllers say of pods that they could not make."""
        what = "pods,jobs,statefulsets"
        found = json.loads(self._kubectl("get", what, self.chosen, "--output=json"))["items"]
        # A Job keeps its former pods: of one place the newest counts.
        made = [_host_of(one) for one in found if one["kind"] == "Pod"]
        hosts = {(h.role, h.index): h for h in sorted(made, key=lambda host: -host.waited_s)}
        for role in (one["metadata"]["labels"][_ROLE] for one in found if one["kind"] != "Pod"):
            wanted = range(self.placement.group(role).hosts)
            missing = [i for i in wanted if (role, i) not in hosts]
            why = self._refused(role) if missing else ""
            hosts |= {(role, i): Host(role, i, "pending", why=why) for i in missing}
        return [hosts[place] for place in sorted(hosts)]

    def _refused(self, role: str) -> str:
        """Why no pod was made: a quota, an admission rule. "": none was refused."""
        chosen = f"involvedObject.name={self.name}-{role},type=Warning"
        words = "get", "events", f"--field-selector={chosen}", "--output=json"
        events = json.loads(self._kubectl(*words))["items"]
        return str(events[-1].get("message", "")) if events else ""

    def log(self, ids: Mapping[str, Any], role: str, lines: int) -> str:
        """kubectl logs of each pod of the role."""
        chosen = f"{self.chosen},{_ROLE}={role}"
        how = (f"--tail={lines}", "--container=zapex", "--prefix", "--ignore-errors")
        return self._kubectl("logs", chosen, "--max-log-requests=50", *how)

    def stop(self, ids: Mapping[str, Any], grace_s: float) -> None:
        """The learner's pod ends first and saves; then all objects go, but the learner's volume."""
        learner = next(group.name for group in self.placement.groups if group.part.learns)
        first = f"{'statefulset' if learner == 'replay' else 'job'}/{self.name}-{learner}"
        how = ("--ignore-not-found", "--cascade=foreground", f"--timeout={grace_s:g}s")
        self._kubectl("delete", first, *how, wait_s=grace_s + 30)
        kinds = "jobs,statefulsets,services,configmaps,secrets"
        self._kubectl("delete", kinds, self.chosen, *how, wait_s=grace_s + 30)

    def _kubectl(self, *words: str, given: str = "", wait_s: float = 60.0) -> str:
        space = f"--namespace={self.table.namespace}"
        return tool("kubectl", *words, space, given=given, wait_s=wait_s)


_CONFINED = {
    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}  # fmt: skip


def _mounts(**paths: str) -> list[dict[str, str]]:
    return [{"name": name, "mountPath": path} for name, path in paths.items()]


def _validate(objects: list[dict[str, Any]]) -> None:
    """Raise ConfigError for an object that is not as the API wants it."""
    try:
        schemas = importlib.import_module("kubernetes_validate")
    except ModuleNotFoundError:
        return  # an extra: the API server checks the same
    for version in VERSIONS:
        for one in objects:
            try:
                schemas.validate(one, version, strict=True)
            except schemas.ValidationError as error:
                where = f"{one['metadata']['name']} is not of API {version}"
                raise ConfigError(f"[kubernetes] {one['kind']} {where}: {error}") from None


def _host_of(pod: Mapping[str, Any]) -> Host:
    """A pod in our words; why: in Kubernetes' words."""
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
