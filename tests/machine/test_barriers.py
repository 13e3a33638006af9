"""Code and models agree: a barrier that a model needs is in the kernel's IR and in its assembly.

`tests/stress/test_models.py` shows that a protocol fails without the rule; here the rule is taken
out of the source, and what the compiler makes of it must no longer be what is expected.
"""

import re
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numba
import pytest
from numba import int64, uint8

from tests.stress.test_models import NEEDED
from zapex.machine import jit

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="needs the JIT")

WORDS, BYTES = int64[::1], uint8[::1]
ARM = "aarch64-unknown-linux-gnu"


class Kernel(NamedTuple):
    """A kernel and its orderings: `ir` in LLVM's words, `arm` in the instructions of aarch64."""

    module: str
    name: str
    arguments: tuple[Any, ...]
    ir: list[str]
    arm: list[str]
    unrolled: bool = False  # a loop, which LLVM repeats as often as the processor likes


COPY = "copy"  # of the bytes that a fence orders
CLAIM, COMMIT, POLL, RELEASE = (
    Kernel("zapex.shm_ring", f"_{name}_kernel", (WORDS, WORDS, int64), ir, arm)
    for name, ir, arm in (
        ("claim", ["load monotonic", "load acquire"], ["ldar"]),
        ("commit", ["load monotonic", "store release"], ["stlr"]),
        ("poll", ["load monotonic", "load acquire"], ["ldar"]),
        ("release", ["load monotonic", "store release"], ["stlr"]),
    )
)
PUBLISH = Kernel(
    "zapex.machine.mailbox", "publish_kernel", (WORDS, BYTES, int64, int64, BYTES),
    ["load monotonic", "store monotonic", "fence release", COPY, "store monotonic",
     "store release"],
    ["dmb ish", COPY, "stlr"],
)  # fmt: skip
READ = Kernel(
    "zapex.machine.mailbox", "read_kernel", (WORDS, BYTES, int64, int64, BYTES),
    ["load acquire", COPY, "fence acquire", "load monotonic"], ["ldar", COPY, "dmb ishld"],
)  # fmt: skip
SLEEP = Kernel(
    "zapex.machine.waiting", "_declare_kernel", (WORDS, int64, int64),
    ["store monotonic", "fence seq_cst"], ["dmb ish"],
)  # fmt: skip
WAKE = Kernel(
    "zapex.machine.waiting", "_sleeps_kernel", (WORDS, int64),
    ["fence seq_cst", "load monotonic"], ["dmb ish"],
)  # fmt: skip
EVICT = Kernel(
    "zapex.chunks.ledger", "_evict_kernel", (WORDS, int64),
    ["store release", "fence release", "store release"], ["stlr", "dmb ish", "stlr"],
)  # fmt: skip
ACCEPT = Kernel("zapex.machine.atomics", "load_kernel", (WORDS, int64), ["load acquire"], ["ldar"])
STATE = Kernel(
    "zapex.chunks.store", "set_state_kernel", (WORDS, int64, int64), ["store release"], ["stlr"]
)
FIND = Kernel(
    "zapex.machine.exchange", "_find_kernel", (WORDS, WORDS, WORDS),
    ["load acquire", "load monotonic"], ["ldar"], unrolled=True,
)  # fmt: skip
KERNELS = [CLAIM, COMMIT, POLL, RELEASE, PUBLISH, READ, SLEEP, WAKE, EVICT, ACCEPT, STATE, FIND]

# (model, its rule) -> the kernel, and the lines of its source that say it, with others instead.
RULES = {
    ("ring", "NO_ACQUIRE_HEAD"): (
        CLAIM, "= load_acquire(words, _HEAD", "= load_relaxed(words, _HEAD"),
    ("ring", "NO_ACQUIRE_TAIL"): (
        POLL, "= load_acquire(words, _TAIL", "= load_relaxed(words, _TAIL"),
    ("ring", "NO_RELEASE_HEAD"): (
        RELEASE, "store_release(words, _HEAD", "store_relaxed(words, _HEAD"),
    ("ring", "NO_RELEASE_TAIL"): (
        COMMIT, "store_release(words, _TAIL", "store_relaxed(words, _TAIL"),
    ("mailbox", "NO_ACQUIRE_FENCE"): (READ, "    fence_acquire()", "    pass"),
    ("mailbox", "NO_ACQUIRE_LATEST"): (
        READ, "load_acquire(words, _LATEST", "load_relaxed(words, _LATEST"),
    ("mailbox", "NO_RECHECK"): (
        READ, "whole = load_relaxed(words, _STAMP_WORD + cell * _HOT_WORDS) == version",
        "whole = True"),
    ("mailbox", "NO_RELEASE_LATEST"): (
        PUBLISH, "store_release(words, _LATEST", "store_relaxed(words, _LATEST"),
    ("mailbox", "NO_STAMP"): (PUBLISH, "    store_relaxed(words, stamp, 0)\n", "\n"),
    ("mailbox", "NO_STAMP_FENCE"): (PUBLISH, "    fence_release()", "    pass"),
    ("sleep", "NO_WAITER_FENCE"): (SLEEP, "    fence_full()  # SYNC sleep: the store", "    #"),
    ("sleep", "NO_WAKER_FENCE"): (WAKE, "    fence_full()  # SYNC sleep: the publish", "    #"),
    ("slots", "NO_GENERATION_FIRST"): (EVICT, "    fence_release()", "    pass"),
    ("exchange", "NO_ACQUIRE_ASKED"): (
        FIND, "load_acquire(words, asked)", "load_relaxed(words, asked)"),
}  # fmt: skip
# Of these the orderings are in a larger kernel (below), or in Python.
ELSEWHERE = {
    ("ring", "NO_FULL_CHECK"), ("mailbox", "CELLS=1"), ("sleep", "NO_SLEEP_LIMIT"),
    ("slots", "NO_ACQUIRE_FENCE"), ("slots", "NO_RECHECK"), ("slots", "NO_RELEASE_COMMIT"),
    ("slots", "NO_FIRST_LOOK"), ("slots", "NO_GRANT_CHECK"), ("slots", "NO_PIDFD"),
    *(("answers", rule) for rule in NEEDED["answers"]),
    # Its other stores and loads are those of ACCEPT and STATE, called by Python in their order.
    *(("exchange", rule) for rule in NEEDED["exchange"] if rule != "NO_ACQUIRE_ASKED"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed kernel has the name and the place of the real one."""
    monkeypatch.setattr(jit, "CACHE_DIRECTORY", None)


def compiled(kernel: Kernel, old: str = "", new: str = "") -> str:
    """The optimised IR of a kernel, of its module's source with `new` in the place of `old`."""
    path = Path(import_module(kernel.module).__file__ or "")
    source = path.read_text()
    assert not old or source.count(old) == 1, f"{kernel.module} has {source.count(old)} x {old!r}"
    module = types.ModuleType(kernel.module)
    sys.modules["changed"] = module
    module.__dict__["__name__"] = "changed"  # dataclasses look their module up
    try:
        exec(compile(source.replace(old, new), str(path), "exec"), module.__dict__)
    finally:
        del sys.modules["changed"]
    function = getattr(module, kernel.name)
    function.compile(kernel.arguments)
    return str(function.inspect_llvm(function.signatures[0]))


def body_of(ir: str) -> str:
    """The kernel alone, without the wrappers that CPython calls."""
    found = re.findall(r"^define [\s\S]*?^}", ir, re.MULTILINE)
    own = [text for text in found if not re.search(r"cpython|cfunc|@NRT_", text.partition("\n")[0])]
    return own[0]


def orderings(ir: str) -> list[str]:
    """Atomic accesses, fences and copies in their order."""
    found = re.findall(
        r"(load|store) atomic i64.*?(monotonic|acquire|release|seq_cst)"
        r"|(fence) (\w+)|(llvm\.memcpy|@memcpy)",
        body_of(ir),
    )
    return [COPY if copy else f"{kind}{fence} {order}{ordering}"
            for kind, order, fence, ordering, copy in found]  # fmt: skip


def instructions(ir: str) -> list[str]:
    """The instructions of aarch64 that order, and calls that copy."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    definition = re.sub(r" #\d+|, ![\w.]+ !\d+", "", body_of(ir))
    declared = set(re.findall(r"^declare .*@llvm\..*$", ir, re.MULTILINE))
    declared |= {f"declare void @NRT_{name}(ptr)" for name in ("incref", "decref")}
    text = "\n".join([f'target triple = "{ARM}"', definition,
                      *(re.sub(r" #\d+", "", line) for line in declared)])  # fmt: skip
    machine = llvm.Target.from_triple(ARM).create_target_machine(opt=3, codemodel="default")
    found = re.findall(r"\b(ldapr|ldar|stlr|dmb)\b[ \t]*(ishld|ish)?|(memcpy)",
                       machine.emit_assembly(llvm.parse_assembly(text)))  # fmt: skip
    return [COPY if copy else f"{name.replace('ldapr', 'ldar')} {kind}".strip()
            for name, kind, copy in found]  # fmt: skip


def once(kernel: Kernel, found: list[str], wanted: list[str]) -> list[str]:
    """What was found, without the repetitions of an unrolled loop."""
    times = len(found) // len(wanted) if kernel.unrolled else 1
    return wanted if found and found == times * wanted else found


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_has_the_orderings_of_its_protocol(kernel: Kernel) -> None:
    ir = compiled(kernel)
    assert once(kernel, orderings(ir), kernel.ir) == kernel.ir
    assert once(kernel, instructions(ir), kernel.arm) == kernel.arm


@pytest.mark.parametrize("rule", RULES, ids=" ".join)
def test_a_rule_of_a_model_that_is_taken_out_of_the_code_is_noticed(rule: tuple[str, str]) -> None:
    kernel, old, new = RULES[rule]
    ir = compiled(kernel, old, new)
    assert once(kernel, orderings(ir), kernel.ir) != kernel.ir
    if rule[1] not in ("NO_RECHECK", "NO_STAMP"):  # these are no instructions that order
        assert once(kernel, instructions(ir), kernel.arm) != kernel.arm


def test_every_rule_of_the_models_is_checked() -> None:
    assert RULES.keys() | ELSEWHERE == {(m, rule) for m, rules in NEEDED.items() for rule in rules}


LOOK = Kernel("zapex.chunks.gather", "_count_torn", (WORDS, BYTES, WORDS), [], [])
GATHER = Kernel("zapex.chunks.gather", "gather_kernel", (WORDS, BYTES, WORDS, BYTES, WORDS), [], [])
NUMBERS = GATHER._replace(name="gather_numbers_kernel", arguments=(*GATHER.arguments, WORDS))
FENCE = "    fence_acquire()\n    torn, headers = 0, mem.view(np.int64)\n"
CHECK = "    return _count_torn(keys, mem, out_keys)\n"
COLUMNS = "    gather_columns(keys, mem, plan, batch, numbers)\n"
FRAMES = "    _gather_frames(keys, numbers, mem, plan, batch)\n"
STEPS = "    # STEP columns-copied\n", "    # STEP rows-copied\n"
COPIES = COLUMNS + STEPS[0] + FRAMES + STEPS[1]


@pytest.mark.parametrize("there", [True, False])
def test_the_second_look_at_the_generations_comes_after_a_fence(there: bool) -> None:
    change = ("", "") if there else (FENCE, FENCE.replace("fence_acquire()", "pass"))
    _, *after = re.split(r"\bfence acquire\b", body_of(compiled(LOOK, *change)))
    assert (len(after) == 1 and "= load i64" in after[0]) == there


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        (GATHER, "", ""),
        (NUMBERS, "", ""),
        (GATHER, COPIES + CHECK, CHECK.replace("return", "torn =") + COPIES + "    return torn\n"),
        (
            NUMBERS,
            COLUMNS + CHECK,
            CHECK.replace("return", "torn =") + COLUMNS + "    return torn\n",
        ),
    ],
    ids=["frames", "numbers", "frames, before its copies", "numbers, before its copies"],
)
def test_a_gather_looks_at_the_generations_after_its_copies(
    kernel: Kernel, old: str, new: str
) -> None:
    ir = body_of(compiled(kernel, old, new))
    found = re.findall(
        r"call \w+ @\w*?(gather_columns|gather_frames|count_torn)|(fence) acquire", ir
    )
    order = [name or fence for name, fence in found]
    copies = ["gather_columns", "gather_frames"][: 2 if kernel is GATHER else 1]
    assert (order in ([*copies, "count_torn"], [*copies, "fence"])) == (old == "")


STREAM = Kernel(
    "zapex.chunks.gather", "_gather_frames", (WORDS, WORDS, BYTES, WORDS, BYTES), [], []
)


@pytest.mark.parametrize("there", [True, False])
def test_streamed_frames_are_followed_by_a_full_fence(there: bool) -> None:
    line = "        fence_full()\n"
    ir = body_of(compiled(STREAM, *(("", "") if there else (line, "        pass\n"))))
    assert "!nontemporal" in ir
    assert ("fence seq_cst" in ir) == there


CLOSE = Kernel("zapex.chunks.builder", "flush_kernel", (WORDS, BYTES), [], [])


@pytest.mark.parametrize("there", [True, False])
def test_a_chunk_is_committed_by_a_release(there: bool) -> None:
    line = "    store_release(headers, header + STATE, w.closed_state)"
    change = ("", "") if there else (line, "    headers[header + STATE] = w.closed_state")
    ir = compiled(CLOSE, *change)
    assert bool(re.search(r"store atomic i64 .* release", ir)) == there
