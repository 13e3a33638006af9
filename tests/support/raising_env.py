"""Environments whose steps fail, for runs in which a process raises."""

from typing import Any

from tests.support.toy_env import Lengths


class Fragile(Lengths):
    """Raises in its tenth step."""

    left = 10

    def step(self, action: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise RuntimeError("the joystick broke off")
        return super().step(action)


def fragile() -> Fragile:
    return Fragile([5])
