"""A whole run: where the cores' time goes, how fast it acts, starts, learns, and against a peer.

    python -m benchmarks.bench_train shares    [--minutes 10]      what all cores do
    python -m benchmarks.bench_train acting    [--rounds 10]       beside its two parts alone
    python -m benchmarks.bench_train startup   [--rounds 3]        until the first step and batch
    python -m benchmarks.bench_train ratio     --peer-python PATH  steps/s at 8 samples a step
    python -m benchmarks.bench_train cartpole  [--rounds 5]        seconds to a return of 475

Each runs `zapex train` as anybody does and looks at it from outside. Beside the goal of each stands
what came out: nothing here fails because a machine is slow.
"""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from benchmarks._harness import arguments, machine_facts, write_json
from benchmarks.train_acting import acting
from benchmarks.train_cartpole import cartpole
from benchmarks.train_ratio import ratio
from benchmarks.train_run import Result
from benchmarks.train_shares import shares
from benchmarks.train_startup import startup
from zapex import environments
from zapex.environments import EnvironmentSpec

MEASUREMENTS: dict[str, Callable[[Namespace, EnvironmentSpec], Result]] = {
    "shares": shares,
    "acting": acting,
    "startup": startup,
    "ratio": ratio,
    "cartpole": cartpole,
}


def main(argv: Sequence[str] | None = None) -> int:
    """What a whole training run costs and brings, in five measurements."""
    parser = arguments(main.__doc__ or "")
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("--env", default="", help="another environment (shares, acting, startup)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of shares' window")
    parser.add_argument("--rounds", type=int, default=0, help="rounds, runs or seeds")
    parser.add_argument("--peer-python", metavar="PYTHON", help="has stable-baselines3")
    parser.add_argument(
        "--train", nargs="*", default=[], help="further flags of `zapex train`, after all others"
    )
    own, found = (list(sys.argv[1:] if argv is None else argv), [])
    if "--train" in own:
        own, found = own[: own.index("--train")], own[own.index("--train") + 1 :]
    options = parser.parse_args(own)
    options.train = found
    # Ended from outside, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bench_train: ended by SIGTERM"))
    load = os.getloadavg()
    solving = options.measurement == "cartpole"
    spec = environments.check(options.env or ("CartPole-v1" if solving else "ALE/Breakout-v5"))
    result = MEASUREMENTS[options.measurement](options, spec)
    if options.json:
        packages = ("numpy", "numba", "torch", "gymnasium", "ale-py")
        write_json(
            options.json,
            f"train {options.measurement}",
            result,
            machine=machine_facts(packages),
            load_average_before=load,
            command=sys.argv[1:],
            environment=spec.env_id,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
