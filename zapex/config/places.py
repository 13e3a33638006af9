"""The device and precision of each role, as the first lines of a run print them."""

from collections.abc import Collection

from zapex.config.settings import Config
from zapex.machine.resources import Machine

_SLOW = " (slow: this CPU has no instructions for it)"


def learner_device(config: Config, machine: Machine) -> str:
    """ "cuda" or "cpu": `--device auto` takes a GPU that torch can use."""
    return _device(config.learner.device, machine)


def _device(asked: str, machine: Machine) -> str:
    return asked if asked != "auto" else "cuda" if machine.learns_on_gpu else "cpu"


def describe(config: Config, machine: Machine, roles: Collection[str], image: bool) -> list[str]:
    """A line for each of `roles` that uses the network. image: whether observations are images."""
    lines = []
    if "actor" in roles:
        precision = config.actor.actor_precision
        central = config.actor.inference == "central"
        if config.actor.inference == "gpu" or (
            central and _device(config.actor.inference_device, machine) == "cuda"
        ):
            where = f"{machine.gpu or 'GPU'}, {_on_gpu(precision, machine, image)}"
        else:
            where = f"CPU, {_on_cpu(precision, machine, image)}"
        lines.append(f"actors: {where}" + (", one process for all of them" if central else ""))
    if "learner" in roles:
        precision = config.learner.precision
        if learner_device(config, machine) == "cuda":
            gpu = machine.gpu or "GPU"
            lines.append(f"learner: {gpu}, {_on_gpu(precision, machine, image)}")
        else:
            threads = "" if config.learner.learner_threads else ", threads as cores become idle"
            lines.append(f"learner: CPU, {_on_cpu(precision, machine, image)}{threads}")
    if "evaluator" in roles and config.evaluator.eval_period_s:
        lines.append(f"evaluator: CPU, {_on_cpu(config.actor.actor_precision, machine, image)}")
    return lines


def _on_cpu(precision: str, machine: Machine, image: bool) -> str:
    if not image or precision == "float32":
        return "float32"
    if precision == "auto":
        return "bfloat16" if machine.cpu_bfloat16 else "float32"
    return precision + ("" if machine.cpu_bfloat16 else _SLOW)


def _on_gpu(precision: str, machine: Machine, image: bool) -> str:
    gpu = machine.gpu
    if image and (precision == "bfloat16" or (precision == "auto" and gpu and gpu.bfloat16)):
        return "bfloat16"
    return "float32" + (f" ({gpu.tf32} in TF32)" if gpu and gpu.tf32 else "")
