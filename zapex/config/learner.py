"""How the learner trains: its network, its loss, its optimiser, and where it computes."""

from dataclasses import dataclass
from typing import Literal

from zapex.config.fields import SettingsGroup, bounded, check_path


@dataclass(frozen=True)
class LearnerConfig(SettingsGroup):
    """How the learner trains."""

    batch_size: int = bounded(512, low=1, high=1 << 16)
    """Transitions in a batch."""
    lr: float = bounded(0.00025 / 4, above=0.0)
    """Learning rate."""
    optimiser: Literal["rmsprop", "adam"] = "rmsprop"
    """Centred RMSProp (the paper's) or Adam."""
    rmsprop_decay: float = bounded(0.95, low=0.0, high=1.0)
    """Decay of RMSProp's averages."""
    optimiser_eps: float = bounded(1.5e-7, above=0.0)
    """Added to the optimiser's denominator."""
    max_grad_norm: float = bounded(40.0, low=0.0)
    """Clip gradients to this norm; 0: never."""
    target_period: int = bounded(2_500, low=1)
    """Batches between two copies into the target network."""
    publish_period_s: float = bounded(1.0, low=0.0)
    """Least seconds between two publications of parameters; 0: after each batch."""
    hidden: int = bounded(512, low=1, high=1 << 14)
    """Width of the hidden layer of each head."""
    channels: int = bounded(32, low=1, high=1 << 10)
    """Filters of an image network's first convolution; the others have twice as many."""
    network: str = "nature"
    """nature (a CNN for images, else a dense layer), impala, or your own as module:Class."""
    dueling: bool = True
    """Two streams, for the state's value and the actions' advantages; else one."""
    layer_norm: bool = False
    """Normalise what a layer gives, before its ReLU."""
    max_pool: int = bounded(0, low=0, high=256)
    """Pool what the convolutions give to a square of this side; 0: do not."""
    double: bool = True
    """The online network chooses the action of the target; else the target network does."""
    munchausen: bool = False
    """Targets of Munchausen DQN (Vieillard et al. 2020), in place of double's."""
    loss: str = "squared"
    """Loss of the TD error: squared (half its square, the paper's; or mse), huber, or your own as
    module:function."""
    device: Literal["auto", "cpu", "cuda"] = bounded("auto", local=True)
    """Where the learner computes."""
    precision: Literal["auto", "float32", "bfloat16"] = bounded("auto", local=True)
    """Precision of the learner's convolutions; heads, targets and loss are always float32."""
    learner_threads: int = bounded(1, low=0, local=True)
    """Threads of the learner on a CPU; 0: as many as are fastest in a trial of a second, and one
    more for each core that idles later, if that makes it faster."""
    gather_threads: int | None = bounded(None, low=0, high=64, local=True)
    """Threads that gather the next batch during a step, where the replay is on this host; left out:
    1 on a GPU, none on a CPU."""
    replay_device: Literal["cpu", "cuda", "cpu-tensor"] = bounded("cpu", local=True)
    """Where the learner has the frames that it gathers from: cuda keeps all of the replay's in the
    GPU's memory, where the replay is on this host; cpu-tensor does the same on a CPU, for tests."""
    cuda_graphs: bool = bounded(True, local=True)
    """On a GPU, record a learning step once and repeat it whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss == "mse":
            object.__setattr__(self, "loss", "squared")
        if self.loss not in ("squared", "huber"):
            check_path(self.loss, "--loss", "squared, huber or ")
        if self.network not in ("nature", "impala"):
            check_path(self.network, "--network", "nature, impala or ")


NETWORK_FIELDS = ("network", "hidden", "channels", "dueling", "layer_norm", "max_pool")
"""The fields of LearnerConfig that a network is made from; a run that goes on keeps them."""
