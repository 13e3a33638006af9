"""Environments whose steps fail: what becomes of a run when one of its processes raises."""

from typing import Any

from tests.toy_env import Lengths


class Fragile(Lengths):
    """Raises in its tenth step."""

    def step(self, action: Any) -> Any:
        self._left = getattr(self, "_left", 10) - 1
        if not self._left:
            raise RuntimeError("the joystick broke off")
        return super().step(action)


def fragile() -> Fragile:
    return Fragile([5])
