"""Fuzz the decoders: `python -m tests.fuzz.fuzz --runs 10000000 --json FILE`.

Each decoder gets a process of its own. The engine is atheris (libFuzzer, guided by coverage) where
it is installed, otherwise seeded mutations without guidance. A finding stops the decoder's process:
an exception that is not of zapex.errors, an input that takes 10 s, more memory than twice the
declared limit, or a message that does not survive encoding and decoding. Its input is kept, and
belongs into tests/fuzz/corpus/<decoder>/ once it is mended: the default suite replays that.

Memory is counted by peak.c, preloaded, where there is a C compiler; otherwise by tracemalloc.
"""

import argparse
import atexit
import ctypes
import faulthandler
import gc
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.support.harness import evidence
from benchmarks.support.machine import Watch

if TYPE_CHECKING:
    from tests.fuzz.decoders import Decoder  # not before `child`: it instruments them

HERE = Path(__file__).parent
PACKAGE = HERE.parent.parent / "zapex"
CORPUS = HERE / "corpus"
HANG_S = 10
MAX_BYTES = 4096
_DONE = "fuzz result: "
_REPORT_AFTER = 1000  # executions


class Meter:
    """Bytes that a call held at most, beyond what was held before it."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self.exact = hasattr(library, "zapex_bytes_now")
        if self.exact:
            self._now = ctypes.c_long.in_dll(library, "zapex_bytes_now")
            self._peak = ctypes.c_long.in_dll(library, "zapex_bytes_peak")
        else:
            tracemalloc.start()

    def start(self) -> int:
        if self.exact:
            before = self._peak.value = self._now.value
            return before
        tracemalloc.reset_peak()
        return tracemalloc.get_traced_memory()[0]

    def peak(self, before: int) -> int:
        if self.exact:
            return self._peak.value - before
        return tracemalloc.get_traced_memory()[1] - before

    def close(self) -> None:
        """Count no more: until then tracemalloc slows everything in this process down."""
        if not self.exact:
            tracemalloc.stop()


def blind_with(draw: random.Random) -> Callable[[bytes], bytes]:
    """A mutation without guidance: some bytes changed, cut out or repeated."""

    def blind(data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(changed) + 1)
            choice = draw.randrange(4)
            if choice == 0:
                changed[at:at] = draw.randbytes(draw.randrange(1, 9))
            elif choice == 1:
                del changed[at : at + draw.randrange(1, 9)]
            elif at < len(changed):
                changed[at] = draw.getrandbits(8)
        return bytes(changed)

    return blind


class Campaign:
    """One decoder's process: counts, measures, and lets findings out."""

    def __init__(self, decoder: "Decoder", meter: Meter) -> None:
        name = decoder.name
        self.decoder = decoder
        self.executions = self.taken = self.peak_bytes = 0
        self._meter = meter
        self.found = [decoder.renew(p.read_bytes()) for p in sorted((CORPUS / name).glob("*"))]
        self.seeds = [*self.decoder.seeds, *self.found]
        for _ in range(2):
            for seed in self.seeds:
                self.decoder.run(seed)  # compiles, imports and caches before anything is counted
        self._start_s = time.process_time()
        self._most = 2 * self.decoder.limit_bytes

    def one(self, data: bytes) -> bool:
        """One execution; whether the input was taken."""
        self.executions += 1
        before = self._meter.start()
        taken = self.decoder.run(data)
        self.taken += taken
        peak = self._meter.peak(before)
        if peak > self.peak_bytes:
            before = self._meter.start()  # once more: the engine's own memory grows now and then
            self.decoder.run(data)
            self.peak_bytes = max(self.peak_bytes, min(peak, self._meter.peak(before)))
            if self.peak_bytes > self._most:
                raise AssertionError(
                    f"{self.peak_bytes} bytes held for {len(data)}, at most {self._most} are right"
                )
        return taken

    def start(self, draw: random.Random) -> bytes:
        """What to mutate: mostly a real input, now and then one that was once a finding."""
        return draw.choice(self.found if self.found and draw.random() < 0.1 else self.decoder.seeds)

    def report(self) -> None:
        """One line for the parent."""
        facts = {
            "executions": self.executions,
            "taken": self.taken,
            "seconds": round(time.process_time() - self._start_s, 1),
            "peak_bytes": self.peak_bytes,
            "limit_bytes": self.decoder.limit_bytes,
            "memory_counted_by": "malloc" if self._meter.exact else "tracemalloc",
        }
        print(_DONE + json.dumps(facts), flush=True)

    def unguided(self, runs: int, seconds: float, seed: int) -> None:
        """Without an engine."""
        draw = random.Random(seed)
        blind = blind_with(draw)
        pool = list(self.seeds)
        deadline = time.monotonic() + seconds
        atexit.register(self.report)
        while self.executions < runs and time.monotonic() < deadline:
            faulthandler.dump_traceback_later(HANG_S + 20, exit=True)
            for _ in range(1000):
                start = self.start(draw) if draw.random() < 0.5 else draw.choice(pool)
                data = self.decoder.mutate(start, draw, blind)
                try:
                    taken = self.one(data)
                except BaseException:
                    Path(tempfile.gettempdir(), f"{self.decoder.name}-crash").write_bytes(data)
                    raise
                if taken and draw.random() < 0.1:  # the mutants of what was taken come next
                    pool = [*pool[-200:], data]
        faulthandler.cancel_dump_traceback_later()

    def guided(self, atheris: Any, runs: int, seconds: float, seed: int, folder: Path) -> None:
        """With atheris. Does not return."""
        draw = random.Random(seed)
        found = folder / "found"
        found.mkdir()
        for i, data in enumerate(self.seeds):
            (found / f"seed-{i}").write_bytes(data)

        def blind(data: bytes) -> bytes:
            return bytes(atheris.Mutate(data, len(data) + 16))

        def mutate(data: bytes, most: int, seed: int) -> bytes:
            # Guided steps away from what is real, and back to it: most of the far ones are refused.
            start = self.start(draw) if draw.random() < 0.5 else data
            return self.decoder.mutate(start, draw, blind)[:most]

        # What was imported is not looked at again and again; garbage is small and waits.
        gc.freeze()
        gc.set_threshold(20_000)
        atexit.register(self.report)
        deadline = time.monotonic() + seconds

        def execute(data: bytes) -> None:
            self.one(data)
            if self.executions % _REPORT_AFTER == 0:
                self.report()  # of a process that a finding ends this one is the last
                if time.monotonic() > deadline:
                    os._exit(0)

        arguments = [
            sys.argv[0], str(found), f"-atheris_runs={runs}", f"-timeout={HANG_S}",
            f"-max_len={MAX_BYTES}", "-rss_limit_mb=0", f"-seed={seed}", "-mutate_depth=1",
            f"-artifact_prefix={tempfile.gettempdir()}/{self.decoder.name}-",
        ]  # fmt: skip
        atheris.Setup(arguments, execute, custom_mutator=mutate)
        atheris.Fuzz()


def with_kernels() -> list[str]:
    """Modules whose code Numba must see as it is."""
    return [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if any(word in path.read_text() for word in ("@kernel", "import numba", "from numba"))
    ]


def child(name: str, runs: int, seconds: float, seed: int) -> None:
    """The decoder's own process."""
    if importlib.util.find_spec("atheris") is None:
        from tests.fuzz.decoders import decoders

        Campaign(decoders()[name], Meter()).unguided(runs, seconds, seed)
        return
    import atheris

    with atheris.instrument_imports(
        include=["zapex"], exclude=with_kernels(), enable_loader_override=False
    ):
        from tests.fuzz.decoders import decoders
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(decoders()[name], Meter())
        campaign.guided(atheris, runs, seconds, seed, Path(folder))


def compiled_meter(folder: Path) -> str:
    """peak.c as a library; "" where there is no compiler."""
    library = folder / "peak.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(HERE / "peak.c")]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return str(library)


def fuzz(name: str, runs: int, seconds: float, seed: int) -> dict[str, Any]:
    """Run one decoder's process and judge how it ended."""
    from tests.fuzz.decoders import memory_folder  # see main

    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(prefix="zapex-fuzz-", dir=memory_folder()) as files,
    ):
        preload = compiled_meter(Path(folder))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": files}
        if preload:
            environment |= {"LD_PRELOAD": preload, "PYTHONMALLOC": "malloc"}
        command = [sys.executable, "-m", "tests.fuzz.fuzz", "--child", "--decoder", name]
        command += [f"--runs={runs}", f"--seconds={seconds}", f"--seed={seed}"]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=HERE.parent.parent,
            check=False,
        )  # fmt: skip
        for found in Path(files).glob(f"{name}-*"):
            kept = shutil.move(found, Path(tempfile.gettempdir(), found.name))
            print(f"the input is in {kept}", file=sys.stderr)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(_DONE)]
    result = json.loads(lines[-1].removeprefix(_DONE)) if lines else {"executions": 0}
    hung = "libFuzzer: timeout" in ended.stderr or "Timeout (" in ended.stderr
    # A process that has done all and dies in the engine's own end has found nothing.
    whole = result["executions"] >= runs or ended.returncode == 0
    result |= {"crashes": int(not whole and not hung), "hangs": int(hung)}
    if not whole:
        shown = (ended.stdout + ended.stderr).splitlines()
        result["tail"] = [line for line in shown if not line.startswith("#")][-40:]
        print("\n".join(result["tail"]), file=sys.stderr)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the decoders.")
    parser.add_argument("--decoder", action="append", help="this one; may be repeated (all)")
    parser.add_argument("--runs", type=int, default=100_000, help="executions of each (100,000)")
    parser.add_argument("--seconds", type=float, default=1e6, help="at most, for each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="results are added to those in here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        child(chosen.decoder[0], chosen.runs, chosen.seconds, chosen.seed)
        return 0
    from tests.fuzz.decoders import decoders  # not before: a child instruments them

    watch = Watch()
    known = list(decoders())
    unknown = set(chosen.decoder or ()) - set(known)
    if unknown:
        parser.error(f"no decoder {sorted(unknown)}; there are {', '.join(known)}")
    bad = 0
    for name in chosen.decoder or known:
        result = fuzz(name, chosen.runs, chosen.seconds, chosen.seed)
        bad += result["crashes"] + result["hangs"]
        print(
            f"{name:12}", json.dumps({k: v for k, v in result.items() if k != "tail"}), flush=True
        )
        if chosen.json:
            atheris = importlib.util.find_spec("atheris") is not None
            engine = "atheris" if atheris else "seeded mutations"
            report = {"benchmark": "fuzz", "results": {}}
            if chosen.json.exists():
                report = json.loads(chosen.json.read_text())
            facts = {"engine": engine, "commit": watch.facts["commit"]}
            before = report["results"].get(name, {})
            for counted in ("executions", "taken", "seconds", "crashes", "hangs"):
                result[counted] = round(result.get(counted, 0) + before.get(counted, 0), 1)
            result["peak_bytes"] = max(result.get("peak_bytes", 0), before.get("peak_bytes", 0))
            report["results"][name] = {**facts, **result}
            report |= evidence(watch, None)
            chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
