"""`make results`: the tables of the documentation and the pictures, from benchmarks/results.

    python -m benchmarks.report [--check]

A table stands on a page between `<!-- table: NAME -->` and `<!-- end -->`; TABLES has a function
for each. --check writes nothing and fails if a page is out of date.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks import learning
from benchmarks.support.machine import RESULTS, ROOT
from zapex.envs.scores import human_share
from zapex.watch import curves

Row = Sequence[str | None]
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)


@cache
def load(name: str) -> Any:
    """A stored result as it lies in its file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def of(name: str) -> Any:
    """The `results` of a stored result."""
    return load(name)["results"]


def over_runs(name: str, figure: Callable[[Any], float]) -> tuple[float, float, float]:
    """Lowest, median and highest of a figure over the runs, hours apart, that a file holds."""
    whole = load(name)
    found = []
    for run in (whole, *whole.get("again", [])):
        try:
            found.append(figure(run["results"]))
        except KeyError:  # a run may lack the rows that need a library
            continue
    return min(found), float(np.median(found)), max(found)


def interval(score: Any, spec: str = ".1f") -> str:
    """A score with its interval."""
    return f"{score['p50']:{spec}} ({score['p10']:{spec}} to {score['p90']:{spec}})"


def training() -> Iterator[Row]:
    """How long and how fast: each row with the file that has it."""
    yield "", "", "file"
    runs = of("train_cartpole")["seeds"].values()
    seconds = np.percentile([run["command_s"] for run in runs], [10, 50, 90])
    yield (
        "CartPole-v1 to 475 (`make demo`), median of five seeds (p10 to p90)",
        f"{seconds[1]:.0f} s ({seconds[0]:.0f} to {seconds[2]:.0f})",
        "train_cartpole",
    )
    scores = load("learning")["scores"]
    for game, text, spec in (
        ("breakout", "Breakout, five seeds (human: 30.5)", ".1f"),
        ("pong", "Pong, five seeds (human: 15)", ".1f"),
        ("spaceinvaders", "Space Invaders, two seeds (human: 1,669)", ",.0f"),
        ("qbert", "Q*bert, two seeds (human: 13,455)", ",.0f"),
        ("mspacman", "Ms. Pac-Man, two seeds (human: 6,952)", ",.0f"),
    ):
        yield text, interval(scores[f"{game}_zapex"], spec), "learning"
    per_s = of("train_speed")["rates_per_s"]
    yield (
        "`zapex train` on Breakout with the memory full and evicting",
        f"{per_s['frames']:,.0f} frames/s, {per_s['samples']:,.0f} samples/s",
        "train_speed",
    )
    steps = of("learner")["step"]
    ratios = {n: one["step_ms"]["p50"] / one["kernels_ms"]["sum"] for n, one in steps.items()}
    yield (
        f"a learner's step over the sum of its kernels' own times, batches of {', '.join(ratios)}",
        ", ".join(f"{ratio:.2f} x" for ratio in ratios.values()),
        "learner",
    )


def variants() -> Iterator[Row]:
    """What each part of Ape-X gives on Breakout."""
    yield "", "mean of 100 games", "million frames", "return in training, halfway", "at the end"
    texts = {
        "as usual": "as usual: prioritized, n = 5, the actors' first priorities",
        "uniform replay": "uniform replay (`--alpha 0`)",
        "n-step 1": "n = 1 (`--n-step 1`)",
        "priorities of the learner alone": "no first priorities (`--initial-priority max`)",
    }
    scores = _scores({name: name for name in texts})
    for variant, text in texts.items():
        one = scores["ALE/Breakout-v5", f"{variant}, Zen 4"]
        frames = f"{one['frames'] / 1e6:.1f}"
        halfway, there = (f"{one[f'return_{when}']:.1f}" for when in ("halfway", "there"))
        yield text, interval(one), frames, halfway, there


def _named(names: Mapping[str, str], minutes: float) -> dict[str, Any]:
    """Runs of so many minutes; the variant of each is its name here, and the processor."""
    return {
        name: {**run, "variant": f"{names[run['variant']]}, {_processor(run['machine'])}"}
        for name, run in of("learning").items()
        if run["minutes"] == minutes and run["variant"] in names and "failed" not in run
    }  # fmt: skip


def _processor(machine: Mapping[str, Any]) -> str:
    """The family of a processor; the names of AMD's do not say it."""
    if "Xeon" in machine["cpu"]:
        return "Xeon"
    caches = machine["cache_bytes"]
    if caches["L2"] < 1 << 20:
        return "Zen 3"
    return "Zen 5" if caches["L1"] > 32 << 10 else "Zen 4"


def _scores(names: Mapping[str, str]) -> dict[tuple[str, str], Any]:
    """Scores of `_named` runs alone after 20 minutes, by environment and variant."""
    scores = learning.scores(_named(names, 20)).values()
    return {(one["env"], one["variant"]): one for one in scores}


def reported() -> Iterator[Row]:
    """Three presets after 20 minutes, beside Dopamine's Rainbow."""
    scores = _scores(
        {"preset": "preset", "second preset": "second preset", "zapex": "first preset"}
    )
    envs = [f"ALE/{game}-v5" for game in learning.REPORTED]
    yield "", *learning.REPORTED
    at = [scores[env, "preset, Zen 3"]["at_frames"] for env in envs]
    rainbow = list(map(learning.dopamine_return, envs, ["Rainbow"] * len(envs), at))
    specs = [",.0f" if one > 100 else ".1f" for one in rainbow]
    there = "in training, at equal frames"
    for name in ("preset, Zen 3", "second preset, Xeon", "first preset, Zen 5"):
        ones = [scores.get((env, name)) for env in envs]
        frames = (f"{one['frames'] / 1e6:.1f}" if one else "" for one in ones)
        yield f"{name}: million frames", *frames
        for text, key in (("the last network", "p50"), (there, "return_there")):
            cells = (
                f"{one[key]:{spec}}" if one else "" for one, spec in zip(ones, specs, strict=True)
            )
            yield f"{name}: {text}", *cells
    yield f"Rainbow: {there}", *map(format, rainbow, specs)


def games() -> Iterator[Row]:
    """The longest run of each game with the preset."""
    runs = {
        name: run for name, run in of("learning").items()
        if run["minutes"] >= 10 and run["variant"] == "preset"
    }  # fmt: skip
    yield from learning.each_game(runs)


def tuning(seed: int = 1, minutes: float = 10) -> Iterator[Row]:
    """Human-normalised scores on the tuning games: the last network's, and in training."""
    envs = [f"ALE/{game}-v5" for game in learning.TUNING]
    runs = {
        name: run for name, run in of("learning").items()
        if run["env"] in envs and run["minutes"] == minutes and run["seed"] == seed
        and "failed" not in run
    }  # fmt: skip
    scores = {(one["env"], one["variant"]): one for one in learning.scores(runs).values()}
    yield "", "batches/s", *learning.TUNING
    variants = {variant for _, variant in scores}
    for variant in sorted(variants, key=lambda one: (not one.endswith("preset"), one)):
        cells = []
        for env in envs:
            one = scores.get((env, variant), {})
            shares = [human_share(env, one[w]) for w in ("p50", "return_there") if w in one]
            cells.append("; ".join(f"{share:.2f}" for share in shares))
        rates = [
            run["batches"] / run["curve"][-1][0] for run in runs.values()
            if run["variant"] == variant and "batches" in run
        ]  # fmt: skip
        yield variant, f"{np.median(rates):.1f}" if rates else "", *cells


def tuning_amx() -> Iterator[Row]:
    """The same with the second seed, on a machine with AMX."""
    yield from tuning(2)


def tuning_zen4() -> Iterator[Row]:
    """The same with the fourth seed, on Zen 4."""
    yield from tuning(4)


def tuning_zen3() -> Iterator[Row]:
    """The same with the fifth seed, on Zen 3."""
    yield from tuning(5)


def tuning_steps() -> Iterator[Row]:
    """The same seed after five minutes: sizes of steps."""
    yield from tuning(4, 5)


def rivals() -> Iterator[Row]:
    """zapex and others on games that no setting was tuned on."""
    runs = {
        (run["variant"], run["env"], run["minutes"]): run for run in of("learning").values()
        if run["seed"] == 1 and "failed" not in run
    }  # fmt: skip
    played = [
        (f"ALE/{game}-v5", minutes) for minutes in (10, 20) for game in learning.REPORTED
        if ("CleanRL PQN", f"ALE/{game}-v5", minutes) in runs
    ]  # fmt: skip
    known = {variant for variant, *game in runs if tuple(game) in played}
    mine = "second preset", "second preset, actor priorities"
    variants = [name for name in (*mine, *learning.RIVALS) if name in known]
    yield "", "minutes", *variants
    for env, minutes in played:
        cells = (_score(runs.get((name, env, minutes))) for name in variants)
        yield env[4:-3], str(minutes), *cells


def _score(run: Mapping[str, Any] | None) -> str:
    """The human-normalised score, and the million frames that were played for it."""
    if run is None:
        return ""
    share = human_share(run["env"], float(np.mean(run["final_returns"])))
    return f"{share:.2f}; {run['curve'][-1][1] / 1e6:.1f}"


def priorities() -> Iterator[Row]:
    """The preset and uniform replay with the same seeds, human-normalised."""
    runs = {name: run for name, run in of("learning").items() if "failed" not in run}
    twins = {name: name.replace("_uniform", "_preset") for name, run in runs.items()
             if run["variant"] == "uniform"}  # fmt: skip
    pairs = {
        one: runs[one] for uniform, preset in twins.items() if preset in runs
        for one in (uniform, preset)
    }  # fmt: skip
    scores = {(one["env"], one["variant"]): one for one in learning.scores(pairs).values()}
    yield "", "seeds", "M frames", "preset", "uniform", "preset: score", "uniform: score"
    rows = []
    for env in dict.fromkeys(env for env, _ in scores):
        both = [scores[env, variant] for variant in ("preset", "uniform")]
        rows.append([human_share(env, one[w]) for w in ("return_there", "p50") for one in both])
        cells = (f"{share:.2f}" for share in rows[-1])
        yield env[4:-3], str(both[0]["runs"]), f"{both[0]['at_frames'] / 1e6:.1f}", *cells
    shares = np.array(rows)
    yield f"mean of {len(rows)} games", "", "", *(f"{mean:.2f}" for mean in shares.mean(0))
    ahead = zip(*curves.mean(shares[:, ::2] - shares[:, 1::2]), strict=True)
    cells = (f"{mean:+.2f} ({low:+.2f} to {high:+.2f})" for mean, low, high in ahead)
    yield "the preset is ahead by", "", "", next(cells), "", next(cells), ""


def learners() -> Iterator[Row]:
    """zapex, CleanRL and Stable-Baselines3 after 20 minutes."""
    yield "", "Breakout", "its million frames", "Pong", "its million frames"
    scores = load("learning")["scores"]
    for name, ours in (("zapex", "as_usual"), ("CleanRL", ""), ("Stable-Baselines3", "")):
        variant = name.lower()
        games = (f"breakout_{ours or variant}", f"pong_{variant}")
        cells = [(scores[one]["p50"], scores[one]["frames"] / 1e6) for one in games]
        yield name, *(text for mean, frames in cells for text in (f"{mean:.1f}", f"{frames:.2f}"))


def replay() -> Iterator[Row]:
    """sample(512) + update_priorities of each library."""
    yield "ms", "n = 1", "n = 3", "n = 5"
    batch = of("replay")["batch"]
    for name, kinds in (
        ("zapex", ["zapex"]),
        ("a loop that only moves the frames", ["roof"]),
        ("Reverb, with threads that fetch ahead", ["reverb"]),
        ("cpprb, the fastest of its three ways", ["cpprb", "cpprb, next_of", CPPRB]),
        ("Tianshou, with its frame stack", ["tianshou"]),
        ("TorchRL", ["torchrl"]),
    ):
        found = [[one[k]["pair"]["p50"] for k in kinds if "pair" in one.get(k, {})]
                 for one in batch.values()]  # fmt: skip
        yield name, *(f"{min(times):.2f}" for times in found)


CPPRB = "cpprb, stack_compress"


def tree() -> Iterator[Row]:
    """Sample + update of each library's sum tree."""
    yield "ns an item", "cold caches", "calls that follow each other"
    for name, one in of("sumtree")["peers"].items():
        times = [one["stratified"][state]["pair"]["p50"] for state in ("cold", "fresh")]
        yield name, *(f"{ns:.0f}" for ns in times)


def scale() -> Iterator[Row]:
    """How the pair grows, and how long restarts and snapshots take."""
    yield "", "2^14 transitions", "2^17", "2^20", "2^21 (16 GB)"
    sizes = [str(2**n) for n in (14, 17, 20, 21)]
    pair = of("scale")["size"]["pair"]["curve"]
    yield (
        "`sample(512)` + `update_priorities`, ms (p99)",
        *(f"{pair[n]['p50'] / 1e3:.1f} ({pair[n]['p99'] / 1e3:.1f})" for n in sizes),
    )
    for text, part, name in (
        ("served again after a SIGKILL, s", "restart", "restart"),
        ("snapshot saved, s", "snapshot", "save"),
        ("snapshot loaded, s", "snapshot", "load"),
    ):
        cells = [_restart(part, name, n) for n in sizes]
        yield text, *(cell if cell is None else f"{cell:.1f}" for cell in cells)


def _restart(part: str, name: str, size: str) -> float | None:
    if size not in of("scale_restarts")[part][name]["curve"]:
        return None
    return over_runs("scale_restarts", lambda r: r[part][name]["curve"][size]["p50"] / 1e6)[1]


def crowds() -> Iterator[Row]:
    """Many processes at one replay."""
    counts = ("1", "2", "4", "8", "16", "64")
    yield "a second, from so many processes", *counts
    found = of("scale_crowds")
    for text, per_s in (
        ("steps added by a handle, 8 streams each", found["actors"]["by handle"]["per_s"]),
        ("sample(32) + update by a handle", found["clients"]["by handle"]["per_s"]),
        ("sample(32) + update by a URL", found["clients"]["by URL"]["per_s"]),
    ):
        yield text, *(f"{per_s[n]['p50']:,.0f}" if n in per_s else None for n in counts)


def clients() -> Iterator[Row]:
    """One call of each kind of client."""
    found = of("clients")
    names = next(iter(found.values()))
    yield "µs a call", *(_CLIENTS[name] for name in names)
    for case, text in {
        "sample": "`sample(512)`, 84x84x4",
        "update": "`update_priorities` of 512",
        "add": "`writer.add`, 8 streams of 84x84",
        "extend": "`extend` of 64 rows, 84x84x4",
        "tiny sample": "`sample(1)`",
        "rare sample": "`sample(1)`, 2 ms after the call before",
        "tiny update": "`update_priorities` of one",
    }.items():
        yield text, *(f"{found[case][name]['p50']:,.0f}" for name in names)


_CLIENTS = {"local": "own", "moved": "shared", "handle": "handle", "url": "URL", "urls": "4 URLs"}


def host() -> Iterator[Row]:
    """Between processes of one host."""
    yield "", "µs"
    cells = {(c["kind"], c["contender"], c["bytes"]): c for c in of("ring")["cells"]}
    spins = cells["round_trip", "ring", 64]["us"]["p50"]
    sleeps = cells["round_trip", "ring, sleeping", 64]["us"]["p50"]
    chunk = cells["chunk_path", "actor to replay", 64 * 84 * 84]["push_us"]["p50"]
    yield "round trip of 64 B, both sides spin", f"{spins:.1f}"
    yield "round trip of 64 B, both sides sleep between", f"{sleeps:.0f}"
    yield "a chunk of 64 Atari transitions, from commit to sampleable", f"{chunk:.0f}"


def hosts() -> Iterator[Row]:
    """Between hosts: each operation and the bare message of its bytes."""
    yield "ms", "zapex", "bare, our send buffer", "bare, the system's", "zapex with keys", "bare"
    for i, (what, text) in enumerate((
        ("push", "push of 800 Atari transitions, until acknowledged"),
        ("pull", "new parameters, 13.17 MB"),
        ("sample", "`sample(512)`, one at a time"),
    )):  # fmt: skip
        way = "push" if what == "push" else "pull"

        def bare(name: str, i: int = i, way: str = way) -> Callable[[Any], float]:
            return lambda r: r["rows"][f"zmq {name}"][i][f"{way}_us"]["p50"] / 1e3

        def ours(kind: str, what: str = what) -> Callable[[Any], float]:
            return lambda r: r["rows"][f"zapex {kind}"][f"{what}_us"]["p50"] / 1e3

        figures = (
            ours("tcp"), bare("tcp, our send buffer"), bare("tcp"), ours("tcp+curve"),
            bare("tcp+curve, our send buffer"),
        )  # fmt: skip
        cells = [over_runs("transport_tcp", figure) for figure in figures]
        yield text, *(f"{mid:.1f} ({low:.1f} to {high:.1f})" for low, mid, high in cells)


def cluster() -> Iterator[Row]:
    """Communication's share of each role's time."""
    yield "share of time", "plain", "with keys", "plain, actors unbounded"
    found = of("cluster")
    real, paced = "real, the paper's network, batch 512", "paced at 20 ms, batch 64"
    ways = ("NULL", "CURVE", "NULL, free")
    for text, name, figure in (
        ("learner, the paper's network", real, lambda r: r["communication"]["learner"]),
        ("the same, of all its threads", real, lambda r: r["busy"]["learner"]["communication"]),
        ("learner with a step of 20 ms", paced, lambda r: r["communication"]["learner"]),
        ("actor", real, lambda r: r["communication"]["actor"]),
        ("relay: waits", real, lambda r: r["shares"]["relay"]["wait"]),
        ("replay server: waits", real, lambda r: r["shares"]["replay"]["wait"]),
    ):
        yield text, *(f"{100 * figure(found[f'{name}, {way}']):.1f} %" for way in ways)
    for text, name in (("the paper's network", real), ("a step of 20 ms", paced)):
        rates = [found[f"{name}, {way}"]["rates_per_s"] for way in ways]
        yield (
            f"{text}: batches/s, steps/s",
            *(f"{rate['batches']:.1f}, {rate['frames'] / 4:,.0f}" for rate in rates),
        )


def survives() -> Iterator[Row]:
    """What was killed or cut, and what was lost."""
    yield "", "lost", "doubled or torn", "command"
    kills = of("kills")
    roles = kills["role_kills"]
    yield (
        "`zapex train` with 30 roles killed at random times", str(roles["lost"]),
        str(roles["doubled"] + roles["torn_or_foreign"]), "`tests.stress.role_kills`",
    )  # fmt: skip
    for name, text in (
        ("network_kills", "four torch-free roles over tcp, 300 kills and 101 cut or frozen links"),
        ("network_kills_zmtp", "the same over zmtp, 100 kills and 30 cuts"),
        ("network_kills_fstack", "the same over F-Stack"),
    ):
        one = kills[name]
        yield (
            f"{text}, {one['at_the_replay']:,} chunks", str(one["lost"]), str(one["doubled"]),
            "`tests.stress.network_kills`",
        )  # fmt: skip


def gpu() -> Iterator[Row]:
    """On one GPU: the learner alone, and in whole runs."""
    yield "", "card", "batches/s", "the learner waits", "frames/s"
    for whole in load("gpu"):
        found, card = whole["results"], whole["machine"]["gpu"]["name"].split()[1]
        for network, rows in (("paper", 512), ("laptop", 64)):
            for place, text in (("host", "the host's frames"), ("cuda", "frames on the GPU")):
                alone = found.get("learner", {}).get(f"{network}, frames on {place}, graphs")
                if alone:
                    what = f"learner alone, {network} network, batches of {rows}, {text}"
                    yield what, card, f"{alone['batches_per_s']:,.0f}", None, None
        for name, text in (
            ("host", "the host's frames"),
            ("device", "frames on the GPU"),
            ("pong", "frames on the GPU, the preset's learning"),
            ("breakout", "frames on the GPU, the preset's learning"),
            ("quantiles", "frames on the GPU, 32 quantiles, shared trunk"),
            ("central", "frames on the GPU, `--inference central` there"),
            ("inference_gpu", "frames on the GPU, `--inference gpu`"),
        ):
            if one := found.get(name):
                game = one["env"].removeprefix("ALE/").removesuffix("-v5")
                yield (
                    f"{game}, {text}, {one['actors']} actors", card,
                    f"{one['learner/batches_per_s']:,.0f}",
                    f"{100 * one['phases/learner_wait']:.1f} %", f"{one['charts/FPS']:,.0f}",
                )  # fmt: skip


def files() -> Iterator[Row]:
    """The command, commit and day of every file."""
    yield "file", "made by", "commit", "day"
    for name, command in COMMANDS.items():
        whole = load(name)
        parts = [whole[0]] if isinstance(whole, list) else [whole, *whole["results"].values()]
        facts = next(one["machine"] for one in parts if "machine" in one)
        yield name, f"`{command}`", facts["commit"] or None, facts["time"][:10]


COMMANDS = {
    "train_cartpole": "zapex bench train cartpole",
    "train_speed": "zapex bench train speed",
    "learning": "make learning",
    "learner": "zapex bench learner",
    "gpu": "make gpu-check",
    "sumtree": "zapex bench sumtree --peers",
    "replay": "zapex bench replay --peers",
    "clients": "zapex bench clients",
    "scale": "zapex bench scale --only size",
    "scale_restarts": "zapex bench scale --only restart --only snapshot",
    "scale_crowds": "zapex bench scale --only actors --only clients",
    "ring": "zapex bench ring",
    "transport_tcp": "zapex bench transport --over tcp tcp+curve --rounds 10",
    "cluster": "zapex bench cluster",
    "simulate": "python -m benchmarks.transport.cluster_model",
    "paper": "zapex bench paper",
    "paper_fstack": "zapex bench paper --systems a d-zmtp d-fstack",
    "paper_redis_fstack": "zapex bench paper --systems a",
    "kills": "python -m tests.stress.role_kills",
    "fuzz": "make fuzz",
}
TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    one.__name__: one
    for one in (
        training, reported, games, tuning, tuning_amx, tuning_zen3, tuning_zen4, tuning_steps,
        rivals, priorities, variants, learners, gpu, replay, tree, scale, crowds, clients, host,
        hosts, cluster, survives, files,
    )
}  # fmt: skip


_PICTURES = (
    ("learning", learning.REPORTED, 20, {
        "zapex": "first preset", "second preset": "second preset", "preset": "preset",
        "cleanrl": "CleanRL DQN", "stable-baselines3": "SB3 DQN",
        **{one: one for one in learning.RIVALS},
    }),
    ("learning_tuning", learning.TUNING, 10, {
        one: one for one in ("preset", "third preset", "second preset", "uniform",
                             "first preset")
    }),
)  # fmt: skip
"""Of each picture: its games, the minutes of its runs, and how it names their variants."""


def markdown(rows: Iterator[Row]) -> str:
    """A table; its first row is the head."""
    lines = [f"| {' | '.join(cell or '' for cell in row)} |" for row in rows]
    columns = lines[0].count(" | ") + 1
    return "\n".join([lines[0], "|" + "---|" * columns, *lines[1:]]) + "\n"


def filled(text: str) -> str:
    """A page with its tables as the results have them. Raises KeyError for an unknown table."""
    return _MARKED.sub(lambda m: f"{m[1]}\n{markdown(TABLES[m[2]]())}\n{m[3]}", text)


def sumtree(cells: list[dict[str, Any]]) -> Figure:
    """The pair and the roofline over capacity and over batch."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, x, fixed, value in (
        (axes[0], "capacity", "batch", 512),
        (axes[1], "batch", "capacity", 2**21),
    ):
        chosen = [cell for cell in cells if cell[fixed] == value]
        for state, colour in (("fresh", "tab:blue"), ("cold", "tab:orange")):
            for name, style in (("pair", "o-"), ("roof", "--")):
                ys = [cell[state][name]["p50"] for cell in chosen]
                axis.plot(
                    [cell[x] for cell in chosen], ys, style, color=colour, markersize=4,
                    label=f"{name}, {state}",
                )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel=x, title=f"{fixed} {value}")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ns an item")
    axes[0].legend()
    figure.suptitle("sample + update of the sum tree, and the memory's own speed")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Write tables and pictures, or check the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="only say which pages are out of date")
    options = parser.parse_args(argv)
    changed = False
    for page in sorted((ROOT / "docs").glob("*.md")):
        text, new = page.read_text(), filled(page.read_text())
        if new != text:
            changed = True
            print(f"{page.relative_to(ROOT)} {'is out of date' if options.check else 'written'}")
            if not options.check:
                page.write_text(new)
    if not options.check:
        sumtree(of("sumtree")["sweep"]).savefig(RESULTS / "sumtree.png", dpi=120)
        for file, shown, minutes, names in _PICTURES:
            runs = {
                name: run for name, run in _named(names, minutes).items()
                if run["env"][4:-3] in shown
            }  # fmt: skip
            learning.plot(runs).savefig(RESULTS / f"{file}.png", dpi=120)
    return int(options.check and changed)


if __name__ == "__main__":
    sys.exit(main())
