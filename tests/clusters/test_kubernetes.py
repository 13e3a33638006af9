"""Kubernetes without a cluster: objects against the API's schemas, and kubectl's answers."""

import base64
import json
import signal
import time
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.support.containers import Pod
from tests.support.parts import free_port
from zapex.clusters import kubernetes as adapter
from zapex.clusters.kubernetes import VERSIONS, Kubernetes
from zapex.clusters.placement import Launched, launch, make_directory, place
from zapex.errors import ConfigError, ZapexError

RUN = '[env]\nenv = "CartPole-v1"\n[run]\npreset = "smoke"\n[kubernetes]\nimage = "zapex:1"\n'
TABLES = {
    "shards": "shards = 3\n",
    "plain": "",
    "learner beside the replay": "with_learner = true\nlearner = { gpus = 1 }\n",
    "all settings": 'port = 7800\nnamespace = "rl"\nstorage_class = "fast"\nstorage_gb = 3\n'
    "learner = { gpus = 2 }\nactor = { hosts = 5, cores = 9, memory_gb = 12 }\n",
}


def made(table: str = "") -> Kubernetes:
    run = place(tomllib.loads(RUN + table), "kubernetes", "n", "/nowhere")
    assert isinstance(run, Kubernetes)
    return run


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_object_fits_the_apis_schema(table: str, version: str) -> None:
    objects = made(table).objects(None)
    assert {one["kind"] for one in objects} >= {"Secret", "Service", "StatefulSet", "Job"}
    for one in objects:
        kubernetes_validate.validate(one, version, strict=True)


def test_a_dry_run_checks_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_FAILURE_RULES", [{"act": "Ignore"}])
    with pytest.raises(ConfigError, match=r"\[kubernetes\] Job zapex-n-learner .* API 1"):
        made().text()


def test_each_shard_has_a_stable_address_and_its_number() -> None:
    objects = {
        (one["kind"], one["metadata"]["name"]): one for one in made("shards = 2").objects(None)
    }
    text = objects["ConfigMap", "zapex-n-settings"]["data"]["launch.json"]
    first, second = json.loads(text)["url"].split(",")
    assert first == "tcp://zapex-n-replay-0.zapex-n-replay.default.svc:7711"
    assert second == "tcp://zapex-n-replay-1.zapex-n-replay.default.svc:7711"
    spec = objects["StatefulSet", "zapex-n-replay"]["spec"]
    assert (spec["replicas"], spec["podManagementPolicy"]) == (2, "Parallel")
    (container,) = spec["template"]["spec"]["containers"]
    index = next(one for one in container["env"] if one["name"] == "INDEX")
    path = index["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['apps.kubernetes.io/pod-index']"


def pods(table: str = "") -> dict[str, Any]:
    """The pod of each role."""
    return {
        one["metadata"]["labels"]["app.kubernetes.io/component"]: one["spec"]["template"]["spec"]
        for one in made(table).objects(None)
        if one["kind"] in ("StatefulSet", "Job")
    }


def test_pods_are_confined_and_have_their_own_key_limits_and_probes() -> None:
    found = pods(TABLES["all settings"])
    for role, pod in found.items():
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for one in (*pod["initContainers"], *pod["containers"]):
            assert not one["securityContext"]["allowPrivilegeEscalation"]
            assert one["resources"]["limits"]["memory"]
        (container,) = pod["containers"]
        assert f"/runs/{role}-$INDEX" in container["livenessProbe"]["exec"]["command"][-1]
        secrets = [v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v]
        assert secrets == [f"zapex-n-{role}-keys"]
    assert found["learner"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    asked = found["replay"]["containers"][0]["readinessProbe"]["exec"]["command"][-1]
    assert "--replay tcp://127.0.0.1:7800" in asked


class Kubectl:
    """A fake kubectl: records its input, and answers from a table."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[str, ...], str]] = []
        self.items: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []

    def __call__(self, *words: str, given: str = "", timeout_s: float = 0) -> str:
        self.calls.append((words, given))
        items = self.events if "events" in words else self.items
        return json.dumps({"items": items}) if words[1] == "get" else "log"


@pytest.fixture
def kubectl(monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    made = Kubectl()
    monkeypatch.setattr(adapter, "tool", made)
    return made


def test_keys_go_through_a_pipe_and_each_secret_has_one_role(
    kubectl: Kubectl, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    run = launch(path, "kubernetes", name="n", directory=tmp_path / "launch")
    (tried, first), (words, given) = kubectl.calls
    assert words[:3] == ("kubectl", "create", "--filename=-")
    assert (set(tried) - set(words), first) == ({"--dry-run=server"}, given)
    objects = json.loads(given)["items"]
    keys = tmp_path / "launch" / "keys"
    relay = json.loads((keys / "relay.key").read_text())["secret"]
    assert not any(relay in word for word in words)
    secrets = [one for one in objects if one["kind"] == "Secret"]
    holders = [
        one["metadata"]["name"]
        for one in secrets
        if any(relay in base64.b64decode(text).decode() for text in one["data"].values())
    ]
    assert holders == ["zapex-n-actor-keys"]
    assert not any(relay in json.dumps(one) for one in objects if one["kind"] != "Secret")
    again = Launched.find(tmp_path / "launch")
    again.stop(5)
    assert [words[1] for words, _ in kubectl.calls] == ["create", "create", "delete", "delete"]
    assert "job/zapex-n-learner" in kubectl.calls[2][0]
    assert run.log("actor") == "log"


def test_nothing_is_created_unless_all_objects_would_be(
    kubectl: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: str, given: str = "", timeout_s: float = 0) -> str:
        kubectl(*words, given=given)
        raise ZapexError("services zapex-n-replay already exists")

    monkeypatch.setattr(adapter, "tool", refuse)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    with pytest.raises(ZapexError, match="already exists"):
        launch(path, "kubernetes", name="n", directory=tmp_path / "launch")
    assert ["--dry-run=server" in words for words, _ in kubectl.calls] == [True]
    assert not (tmp_path / "launch").exists()


def an_object(kind: str, role: str, **more: Any) -> dict[str, Any]:
    metadata = {"labels": {"app.kubernetes.io/component": role}}
    metadata["creationTimestamp"] = more.pop("made", "2026-01-01T00:00:00Z")
    return {"kind": kind, "metadata": metadata, "spec": {}, **more}


def test_a_waiting_pod_has_kubernetes_own_reason(kubectl: Kubectl) -> None:
    reason = "0/3 nodes: 3 Insufficient cpu."
    unscheduled = {"type": "PodScheduled", "status": "False", "message": reason}
    pull = {"reason": "ImagePullBackOff", "message": "not found"}
    kubectl.items = [
        an_object("Pod", "replay", status={"phase": "Pending", "conditions": [unscheduled]}),
        an_object("Pod", "learner", status={"phase": "Failed"}),
        an_object(
            "Pod", "learner", made="2026-01-02T00:00:00Z",
            status={"phase": "Pending", "containerStatuses": [{"state": {"waiting": pull}}]},
        ),
        an_object("Job", "actor"),
    ]  # fmt: skip
    kubectl.events = [{"message": "pods is forbidden: exceeded quota: cpu"}]
    states = {host.role: host for host in made().states()}
    assert states["replay"].why == reason
    assert states["learner"].state == "pending"
    assert states["learner"].why == "ImagePullBackOff: not found"
    assert states["actor"].why == "pods is forbidden: exceeded quota: cpu"
    kubectl.items = []
    assert made().states() == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_containers_command_runs_answers_its_probe_and_ends_on_sigterm(
    tmp_path: Path,
) -> None:
    """The init container's script and the container's command, with the paths of this machine."""
    table = f"port = {free_port()}\n"
    run = place(tomllib.loads(RUN + table), "kubernetes", "n", tmp_path / "launch")
    assert isinstance(run, Kubernetes)
    make_directory(run)
    pod = Pod(tmp_path / "pod", run, "replay")
    pod.prepare()
    key = pod.root / "zapex" / "home" / "keys" / "replay.key"
    assert key.stat().st_mode & 0o777 == 0o600
    host = pod.start()
    try:
        assert pod.probe() == 1
        deadline_s = time.monotonic() + 120
        while pod.probe():
            assert time.monotonic() < deadline_s, pod.output
            assert host.poll() is None, pod.output
            time.sleep(0.5)
        while "listening at" not in pod.output:  # the command's output is passed on
            assert time.monotonic() < deadline_s, pod.output
            time.sleep(0.1)
        host.send_signal(signal.SIGTERM)
        assert host.wait(90) == 128 + signal.SIGTERM  # so that a Job makes another pod
        assert pod.probe() == 1
    finally:
        host.kill()
        host.wait(10)
