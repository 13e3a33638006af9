"""`zapex card`: a folder that publishes a run, with a model card as Hugging Face's hub shows it."""

import contextlib
import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zapex.cli.flags import parse
from zapex.cli.play import Stored, draw_without_a_window
from zapex.config.fields import SettingsGroup
from zapex.errors import ConfigError, ZapexError
from zapex.version import __version__

if TYPE_CHECKING:
    from zapex.agent.networks import Network
    from zapex.run.checkpoints import Checkpoint
    from zapex.watch.report import Evaluation

_MOST_PICTURE_BYTES = 1 << 26


@dataclass(frozen=True)
class _CardOptions(SettingsGroup):
    """Options."""

    run: str = ""
    """Directory of the run, or its name in runs/."""
    out: str = ""
    """Folder to write; default: card in the run's directory."""
    trust: bool = False
    """Allow the modules that the run names."""


def command(args: list[str]) -> int:
    """`zapex card RUN`: the best network, settings, curve, video and a model card."""
    what = "Write a folder to publish: network, settings, curve, video and a model card."
    options = parse(_CardOptions(), args, "card", what, "run")
    from zapex.run import checkpoints, directory
    from zapex.watch.report import best_of
    from zapex.watch.runs import find

    run = Stored.of(find(options.run), "", options.trust, "cpu")
    folder = Path(options.out) if options.out else run.run_dir / "card"
    best = best_of(directory.evaluations(run.run_dir))
    found = checkpoints.load(checkpoints.find(run.run_dir, "best"))
    learner = replace(run.config.learner, device="cpu", precision="float32")
    network = checkpoints.load_network(found, run.spec, learner)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # As a checkpoint without the optimizer's state, which zapex.load_policy reads.
        mine = {f"online.{name}": view.numpy() for name, view in network.views.items()}
        checkpoints.save(folder, checkpoints.BEST, mine, found.state)
        _write(folder / "config.toml", run.config.to_toml())
        extras = _extras(run, network, folder)
        _write(folder / "README.md", _card(run, found, best, extras))
    except OSError as error:
        raise ZapexError(f"{folder} cannot be written: {error.strerror or error}") from error
    print(f"checkpoint {found.path}")
    names = ["best.safetensors", "config.toml", "README.md", *extras]
    print(f"card {folder}: {', '.join(names)}")
    print(f"publish it: hf upload USER/NAME {folder}")
    return 0


def _write(path: Path, content: str | bytes) -> None:
    from zapex.machine.disk import replace_whole

    replace_whole(path, [content.encode() if isinstance(content, str) else content])


def _extras(run: Stored, network: "Network", folder: Path) -> list[str]:
    """Write what this installation and this run allow. Returns the names of the files."""
    from zapex.machine.reading import read_regular
    from zapex.roles import evaluator
    from zapex.watch.curves import draw_run

    spec, made = run.spec, []
    with contextlib.suppress(ConfigError):  # no game has ended yet
        picture = draw_run(run.run_dir, references=spec.references, title=spec.env_id)
        _write(folder / picture.name, read_regular(picture, _MOST_PICTURE_BYTES))
        made.append(picture.name)
    if importlib.util.find_spec("onnx") and importlib.util.find_spec("onnxruntime"):
        from zapex.agent.export import export

        export(network, folder / "policy.onnx", spec.observation_dtype)
        made.append("policy.onnx")
    if spec.films and importlib.util.find_spec("imageio_ffmpeg"):
        draw_without_a_window()
        played = run.config.evaluator
        video = folder / "replay.mp4"  # the name that the hub plays
        video.unlink(missing_ok=True)  # it may be a link: never written through
        evaluator.evaluate(
            network.q_values,
            spec,
            1,
            seed=1,
            epsilon=played.eval_epsilon,
            noop_max=played.eval_noop_max,
            video=video,
        )
        made.append(video.name)
    return made


def _card(run: Stored, found: "Checkpoint", best: "Evaluation | None", extras: list[str]) -> str:
    """The model card: what the hub reads, as YAML, and what people read.

    JSON strings are YAML strings, so a name cannot end its line.
    """
    env = run.spec.env_id
    tags = [env, "deep-reinforcement-learning", "reinforcement-learning", "ape-x", "zapex"]
    front = ["library_name: zapex", "pipeline_tag: reinforcement-learning", "tags:"]
    front += [f"- {json.dumps(tag)}" for tag in tags]
    score = "It has not been evaluated."
    if best is not None:
        value = f"{best.mean:.2f} +/- {best.std:.2f}"
        front += [
            "model-index:",
            "- name: Ape-X DQN",
            "  results:",
            "  - task:",
            "      type: reinforcement-learning",
            "      name: reinforcement-learning",
            "    dataset:",
            f"      name: {json.dumps(env)}",
            f"      type: {json.dumps(env)}",
            "    metrics:",
            "    - type: mean_reward",
            f"      value: {value}",
            "      name: mean_reward",
            "      verified: false",
        ]
        score = (
            f"Its best evaluation, after {best.frames:,} frames, has a mean return of "
            f"**{value}** (standard deviation of {len(best.returns)} games)."
        )
    shown = "\n\n".join(f"![Returns during training]({n})" for n in extras if n.endswith(".png"))
    files = {
        "best.safetensors": "the network, for `zapex.load_policy`",
        "config.toml": "all settings of the run",
        "policy.onnx": "the network for ONNX: input `obs` (B, ...), output `q_values` (B, actions)",
        "replay.mp4": "a game that it plays",
    }
    listed = [
        f"* `{name}`: {text}"
        for name, text in files.items()
        if name in ("best.safetensors", "config.toml", *extras)
    ]
    return "\n".join(
        [
            *("---", *front, "---", ""),
            *(f"# Ape-X DQN plays {env}", ""),
            *(f"Trained with zapex {__version__}, seed {run.config.run.seed}. {score}", ""),
            *((shown, "") if shown else ()),
            *("## Use", "", "```python", "import zapex", ""),
            'policy = zapex.load_policy("best.safetensors")',
            "action = policy(obs)  # an observation of the environment",
            *("```", "", f"The environment: {run.spec.describe}", ""),
            *("## Files", "", *listed, ""),
        ]
    )
