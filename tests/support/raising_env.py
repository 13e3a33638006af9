"""Environments whose steps fail, for runs in which a process raises."""

import os
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


class Quitting(Fragile):
    """Ends its process with status 0 in its tenth step, as a library's clean-up may do."""

    def step(self, action: Any) -> Any:
        if self.left == 1:
            os._exit(0)
        return super().step(action)


def quitting() -> Quitting:
    return Quitting([5])
