"""Pods without a cluster: what their containers run, as processes of this machine.

The init container's script and the container's own command, with the paths of a pod moved into a
directory. Nothing is confined: only the volumes, the words and the environment are a pod's.
"""

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.parts import VARIABLES
from zapex.clusters.kubernetes import Kubernetes

_VOLUMES = ("zapex", "keys", "settings", "runs")


class Pod:
    """One pod of a role, in a new directory `root`. Its address of the replay is `url`.

    runs: the volume that outlives pods, for a role that has one.
    """

    def __init__(
        self, root: Path, kubernetes: Kubernetes, role: str, index: int = 0, *,
        url: str = "", runs: Path | None = None,
    ) -> None:  # fmt: skip
        root.mkdir()
        self.root, self.index = root, index
        self.runs = root / "runs" if runs is None else runs
        for name in _VOLUMES:
            (root / name).mkdir(exist_ok=True)
        self.runs.mkdir(exist_ok=True)
        pods = {}
        for one in kubernetes.objects(kubernetes.directory / "keys"):
            name = one["metadata"]["name"]
            if one["kind"] in ("StatefulSet", "Job"):
                pods[name] = one["spec"]["template"]["spec"]
            for file, text in one.get("data", {}).items():
                if name == f"{kubernetes.name}-{role}-keys":
                    (root / "keys" / file).write_bytes(base64.b64decode(text))
                elif name == f"{kubernetes.name}-settings":
                    (root / "settings" / file).write_text(text)
        self.spec: dict[str, Any] = pods[f"{kubernetes.name}-{role}"]
        path = root / "settings" / "launch.json"
        facts = json.loads(path.read_text())
        path.write_text(json.dumps({**facts, "runs": str(self.runs), "url": url or facts["url"]}))
        python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where `python` is
        self.env = {**os.environ, **VARIABLES, "INDEX": str(index), "PATH": python}

    def here(self, words: list[str]) -> list[str]:
        """A pod's command line with the paths of this machine."""
        moved = [
            re.sub(rf"(?<![\w/])/(?=({'|'.join(_VOLUMES[:3])})/)", f"{self.root}/", word)
            for word in words
        ]
        moved = [re.sub(r"(?<![\w/])/runs/", f"{self.runs}/", word) for word in moved]
        return [word.replace("$(INDEX)", str(self.index)) for word in moved]

    def prepare(self) -> None:
        """What the init container does."""
        command = self.here(self.spec["initContainers"][0]["command"])
        subprocess.run(command, check=True, env=self.env, timeout=60)

    def probe(self) -> int:
        """The exit code of the readiness probe."""
        words = self.here(self.spec["containers"][0]["readinessProbe"]["exec"]["command"])
        return subprocess.run(words, env=self.env, check=False, timeout=60).returncode

    def start(self) -> subprocess.Popen[bytes]:
        """The container's command; it writes to `output`."""
        words = self.here(self.spec["containers"][0]["command"])
        with (self.root / "output.txt").open("ab") as file:
            return subprocess.Popen(words, stdout=file, stderr=file, env=self.env)

    @property
    def output(self) -> str:
        """All that the container has said."""
        return (self.root / "output.txt").read_text(errors="replace")
