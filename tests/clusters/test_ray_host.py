"""One Ray actor without Ray: keys that arrive sealed, and the host that it starts."""

import dataclasses
from pathlib import Path

import pytest

from zapex.clusters import ray
from zapex.clusters.placement import make_directory, place
from zapex.version import __version__

pytest.importorskip("nacl", reason='pip install "zapex[ray]"')


def test_a_host_starts_with_its_own_key_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "_own_address", lambda: "127.0.0.1")
    run = place({"env": {"env": "CartPole-v1"}, "ray": {}}, "ray", "a", tmp_path / "run")
    learner = dataclasses.replace(run.placement.group("learner"), command=("--version",))
    run.placement = dataclasses.replace(
        run.placement, groups={**run.placement.groups, "learner": learner}
    )
    assert isinstance(run, ray.Ray)
    make_directory(run)
    host = ray.RayHost("learner", 0)
    assert (host.poll()["state"], host.poll()["url"]) == (ray._NO_KEYS, "")
    sealed = run._sealed("learner", host.poll()["public"])
    secret = (tmp_path / "run/keys/learner.key").read_bytes()
    assert secret not in sealed
    host.replay_is_at("tcp://127.0.0.1:1")
    host.start(sealed)
    try:
        assert {path.name for path in (host._home / "keys").iterdir()} == {
            "learner.key",
            "public.json",
        }
        assert (host._home / "keys/learner.key").stat().st_mode & 0o777 == 0o600
        assert host.poll()["url"] == "tcp://127.0.0.1:1"
        assert host._child is not None
        assert host._child.wait(60) == 0
        assert __version__ in host.tail(5)
        assert (host.poll()["state"], host.poll()["code"]) == ("working", 0)
    finally:
        host.stop(10)
    assert not host._home.exists()
