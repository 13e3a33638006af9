"""A whole run: where the cores' time goes, how fast it acts, starts, learns, and against a peer.

    zapex bench train shares    [--minutes 10]      what all cores do
    zapex bench train acting    [--rounds 10]       beside its two parts alone
    zapex bench train startup   [--rounds 5]        until the first step and batch
    zapex bench train ratio     --peer-python PATH  steps/s at 8 samples a step
    zapex bench train cartpole  [--rounds 5]        seconds to a return of 475
    zapex bench train gathering [--step-ms 3]       batches/s of a learner with a fast GPU's step
    zapex bench train watchers  [--rounds 10]       what two `zapex watch` beside it cost

Each runs `zapex train` as anybody does and looks at it from outside. Beside the goal of each stands
what came out: nothing here fails because a machine is slow.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.support.harness import arguments, write_json
from benchmarks.train.acting import acting
from benchmarks.train.cartpole import cartpole
from benchmarks.train.gathering import gathering
from benchmarks.train.ratio import ratio
from benchmarks.train.shares import shares
from benchmarks.train.startup import startup
from benchmarks.train.watchers import watchers
from benchmarks.train.whole_run import Result
from zapex.envs import environments
from zapex.envs.environments import EnvironmentSpec

MEASUREMENTS: dict[str, Callable[[Namespace, EnvironmentSpec], Result]] = {
    "shares": shares,
    "acting": acting,
    "startup": startup,
    "ratio": ratio,
    "cartpole": cartpole,
    "gathering": gathering,
    "watchers": watchers,
}
ROUNDS = {
    "shares": (5, 1),
    "acting": (10, 2),
    "startup": (5, 1),
    "ratio": (5, 1),
    "cartpole": (5, 1),
    "gathering": (5, 1),
    "watchers": (10, 1),
}
"""Rounds, runs or seeds: of the whole measurement, and of its quick form."""


def main(argv: Sequence[str] | None = None) -> int:
    """What a whole training run costs and brings, in seven measurements."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("--env", default="", help="another environment (shares, acting, startup)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of shares' windows together")
    parser.add_argument("--step-ms", type=float, default=3.0, help="of gathering's learner")
    parser.add_argument("--rounds", type=int, help="rounds, runs or seeds")
    parser.add_argument("--peer-python", metavar="PYTHON", help="has stable-baselines3")
    parser.add_argument(
        "--train", nargs="*", default=[], help="further flags of `zapex train`, after all others"
    )
    words = list(sys.argv[1:] if argv is None else argv)
    own, found = words, []
    if "--train" in own:
        own, found = own[: own.index("--train")], own[own.index("--train") + 1 :]
    options = parser.parse_args(own)
    options.train = found
    if options.rounds is None:
        options.rounds = ROUNDS[options.measurement][int(options.quick)]
    solving = options.measurement == "cartpole"
    spec = environments.check(options.env or ("CartPole-v1" if solving else "ALE/Breakout-v5"))
    result = MEASUREMENTS[options.measurement](options, spec)
    write_json(
        options, f"train {options.measurement}", result, rounds=options.rounds,
        # Of the file its name alone: where it lies says nothing about the result.
        command=[Path(w).name if options.json == Path(w) else w for w in words],
        environment=spec.env_id,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
