"""One message of each kind, and what it is for two of them to say the same."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from zapex.chunks.schema import Schema
from zapex.wire import messages as m
from zapex.wire.protocol import as_buffer


def examples(
    push: m.Push, batch: m.BatchMessage, config: Mapping[str, Any], schema: Schema
) -> dict[str, m.Message]:
    """A message of each kind, by name; push and batch are of the schema."""
    states = np.array([(3, 77, 12, 4096), (4, 78, 0, 0)], m.ACTOR_STATE)
    keys, priorities = np.array([1 << 27, -1]), np.array([0.5, -2.0], np.float32)
    return {
        "hello": m.Hello("relay", 1234, 77, m.SMALL, push.schema, 2, config),
        "welcome": m.Welcome(99, push.schema, 55, 7, 8, 4, True, states),
        "push": push,
        "ack": m.Ack(states),
        "sample": m.Sample(5, 2, True, 1, method=2, part=True),
        "no_batch": m.NoBatch(5, 2, "too few transitions"),
        "batch": batch,
        "update": m.Update(55, 6, keys, priorities),
        "update_ack": m.UpdateAck(7, 1),
        "pull": m.Pull(3, 41),
        "params": m.Params(42, as_buffer(b"12345678")),
        "publish": m.Publish(43, as_buffer(b"87654321")),
        "publish_ack": m.PublishAck(0, 43),
        "stats": m.Stats(3, 1_000, as_buffer(bytes(16)), as_buffer(b"episode.")),
        "bye": m.Bye(),
        "error": m.Error(m.Fault.FENCED, "a newer one is there"),
        "call": m.Call(8, 1, rows=2, epoch=55, keys=keys, priorities=np.array([0.5, -2.0])),
        "reply": m.Reply(8, 2, 3, 4, as_buffer(b"a priority is NaN")),
    }


def same(a: Any, b: Any) -> bool:
    """Two decoded messages say the same."""
    return type(a) is type(b) and all(
        _same_value(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
    )


def _same_value(x: Any, y: Any) -> bool:
    if isinstance(x, np.ndarray):
        return x.tobytes() == y.tobytes()
    if isinstance(x, dict):  # NaN is not itself
        return json.dumps(x, sort_keys=True) == json.dumps(y, sort_keys=True)
    return bool(x == y)
