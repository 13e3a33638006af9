"""A network as an ONNX file that needs no zapex, checked with onnxruntime."""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zapex.agent import fused
from zapex.agent.networks import Network
from zapex.errors import ConfigError, ZapexError
from zapex.machine.disk import replace_whole

_ROWS = 5
_TOLERANCE = 1e-3  # of the largest Q value: sums are made in another order


class _Whole(nn.Module):
    """From observations as the replay keeps them to Q values."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = [network]

    def forward(self, obs: Tensor) -> Any:
        network = self._network[0]
        return network(network.to_plain_input(obs))


def export(network: Network, file: Path, dtype: str) -> float:
    """Write `network`, of float32 on the CPU, and compare the file's Q values with its own.

    dtype: of its observations. The file has one input `obs` (B, *obs_shape) and one output
    `q_values` float32 (B, num_actions).

    Returns the largest difference. Raises ConfigError: onnx or onnxruntime is missing, or the
    network has an operator that ONNX lacks, or the file gives other Q values. Raises ZapexError if
    the disk refuses it. An older file is replaced only by one that was checked.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ImportError as error:
        raise ConfigError(f'--onnx needs {error.name}: pip install "zapex[onnx]"') from None
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(_ROWS, *network.obs_shape)).astype(dtype)
    if dtype == "uint8":
        obs = rng.integers(0, 256, obs.shape, dtype=np.uint8)
    written = io.BytesIO()
    wanted = network(network.to_input(obs)).detach().numpy()
    try:
        with torch.no_grad(), fused.plain_operators(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of shapes that are constants here
            torch.onnx.export(
                _Whole(network.detached()).eval(),
                (torch.from_numpy(obs),),
                written,  # type: ignore[arg-type]
                input_names=["obs"],
                output_names=["q_values"],
                dynamic_axes={"obs": {0: "B"}, "q_values": {0: "B"}},
                dynamo=False,
            )
    except (RuntimeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(f"the network cannot be written as ONNX: {first}") from error
    session = onnxruntime.InferenceSession(written.getvalue(), providers=["CPUExecutionProvider"])
    # Not the traced number of rows: it must not have become a part of the file.
    for rows in (_ROWS, 1):
        try:
            (found,) = session.run(["q_values"], {"obs": obs[:rows]})
        except Exception as error:  # onnxruntime's have no common class
            raise ConfigError(f"{file} does not run with {rows} observations: {error}") from error
        off = float(np.abs(found - wanted[:rows]).max())
        if found.shape != wanted[:rows].shape or off > _TOLERANCE * max(1.0, np.abs(wanted).max()):
            raise ConfigError(f"{file} gives other Q values than the network: they differ by {off}")
    try:
        replace_whole(file, [written.getbuffer()])
    except OSError as error:
        raise ZapexError(f"{file} cannot be written: {error.strerror}") from error
    return off
