"""What is learned: games, seeds and variants, fixed before any of it was looked at.

The settings of presets were tuned on Breakout and Pong without sticky actions, and on Boxing with
them, seed 1. The seeds here are others, and so are three of the games. All have sticky actions.
"""

from dataclasses import dataclass

MINUTES = 20.0
EVALUATION_GAMES = 100
OURS = "zapex"
SB3 = "stable-baselines3"
CLEANRL = "cleanrl"
PEERS = {SB3: "dqn_learning.py", CLEANRL: "cleanrl_learning.py"}
"""Their scripts in benchmarks/peers."""
BREAKOUT, PONG = "ALE/Breakout-v5", "ALE/Pong-v5"
OTHERS = ("ALE/SpaceInvaders-v5", "ALE/Qbert-v5", "ALE/MsPacman-v5")

ABLATIONS: dict[str, tuple[str, ...]] = {
    "uniform replay": ("--alpha", "0"),
    "n-step 1": ("--n-step", "1"),
    "priorities of the learner alone": ("--initial-priority", "max"),
}
"""Each changes one thing of `zapex`: prioritised replay, n = 5, the actors' own priorities."""
AS_USUAL = "as usual"
"""`zapex` again, on the machine and the code of the ablations: beside these they count."""


def group_name(env: str, variant: str, *seed: int) -> str:
    """As pong_11_zapex, or pong_zapex of all seeds."""
    game = env.rpartition("/")[2].partition("-")[0].lower()
    return "_".join([game, *map(str, seed), variant.replace(" ", "_")])


@dataclass(frozen=True)
class Cell:
    """One run of `variant`; flags: of `zapex train`."""

    variant: str
    env: str
    seed: int
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its file."""
        return group_name(self.env, self.variant, self.seed)


def _cells() -> list[Cell]:
    """The most important first."""
    found = [Cell(OURS, env, seed) for seed in range(11, 16) for env in (BREAKOUT, PONG)]
    found += [Cell(OURS, env, seed) for seed in (11, 12) for env in OTHERS]
    found += [
        Cell(variant, BREAKOUT, seed, flags)
        for seed in (11, 12, 13)
        for variant, flags in {AS_USUAL: (), **ABLATIONS}.items()
    ]
    for peer in PEERS:
        found += [Cell(peer, env, seed) for seed in (11, 12, 13) for env in (BREAKOUT, PONG)]
    return found


CELLS = {cell.name: cell for cell in _cells()}
