"""How the learner of a run steps, and where its batches and the frames of the replay are."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zapex.chunks.batch import Batch, split
from zapex.chunks.device_frames import DeviceFrames
from zapex.chunks.layout import BatchLayout
from zapex.errors import ConfigError
from zapex.roles.learner import AtOnce, Trainer
from zapex.run.run import Run
from zapex.shm_transport import HostMemory

if TYPE_CHECKING:
    from zapex.agent.learning import DQN


@dataclass(frozen=True)
class Training:
    """trainer: None: the DQN's own steps, at once. batches: to be used in turn.

    gather_threads, frames: for the source, if the replay is on this host.
    """

    trainer: Trainer | None
    batches: list[Batch]
    gather_threads: int
    frames: DeviceFrames | None


def plan_training(
    run: Run, host: HostMemory, dqn: "DQN", learns: Any, replay_is_here: bool
) -> Training:
    """Decide by the learner's device and the settings. learns: `dqn`, or what a wrap made of it.

    Raises ConfigError.
    """
    config, plan, device = run.config.learner, host.plan, dqn.online.device
    cuda = device.type == "cuda"
    frames = None
    if config.replay_device != "cpu":
        _check(config.replay_device, device.type, replay_is_here)
        frames = DeviceFrames(host.store(), device)
    layout = BatchLayout(
        plan.replay.schema,
        plan.batch_size,
        channels_last=learns.channels_last,
        frames_apart=frames is not None,
    )
    trainer: Trainer | None = None
    if cuda and learns is dqn:
        trainer = pipeline(dqn, layout, frames, config.cuda_graphs)
    elif frames is not None:
        trainer = AtOnce(learns, _completed_by(frames))
    late = trainer.late if trainer is not None else 0
    threads = int(cuda) if config.gather_threads is None else config.gather_threads
    # With fewer requests ahead, no next batch has come when the learner begins with one.
    ahead = (threads > 0 or not replay_is_here) and plan.prefetch >= 3 + late
    batches = [Batch.empty(layout, pin_memory=cuda) for _ in range(1 + late + ahead)]
    return Training(trainer, batches, threads, frames)


def _check(replay_device: str, device: str, replay_is_here: bool) -> None:
    if not replay_is_here:
        raise ConfigError(
            f"--replay-device {replay_device} needs the replay on the learner's host: leave it out"
        )
    needed = "cuda" if replay_device == "cuda" else "cpu"
    if device != needed:
        raise ConfigError(
            f"--replay-device {replay_device} needs a learner on {needed}, but it computes on "
            f"{device}: give --device {needed} or leave --replay-device out"
        )


def _completed_by(frames: DeviceFrames) -> Any:
    def complete(batch: Batch) -> dict[str, Any]:
        frames.put_in_place(batch)
        return frames.complete(batch.torch())

    return complete


def pipeline(dqn: "DQN", layout: BatchLayout, frames: DeviceFrames | None, graphs: bool) -> Trainer:
    """The steps of a DQN on a GPU."""
    from zapex.agent.device import CudaQueues, Device, Pipeline

    queues = CudaQueues(dqn.online.device, graphs)
    device = Device(queues, layout.nbytes, dqn.results(layout.batch_size))
    if frames is None:
        return Pipeline(dqn, device, lambda block: split(layout, block))
    return Pipeline(
        dqn, device, lambda block: frames.complete(split(layout, block)), frames.put_in_place
    )
