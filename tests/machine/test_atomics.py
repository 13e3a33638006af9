"""Atomics: the generated assembly has the right instructions; the operations do what they say."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from numba.core.errors import TypingError

from zapex.machine import atomics
from zapex.machine.jit import kernel

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="needs the JIT")


def _load_acquire(words: Any, i: int) -> int:
    return atomics.load_acquire(words, i)


def _store_release(words: Any, i: int) -> None:
    atomics.store_release(words, i, 7)


def _load_relaxed(words: Any, i: int) -> int:
    return atomics.load_relaxed(words, i)


def _store_relaxed(words: Any, i: int) -> None:
    atomics.store_relaxed(words, i, 7)


def _fence_acquire(words: Any, i: int) -> int:
    first = words[i]
    atomics.fence_acquire()
    return first + words[i]


def _fence_release(words: Any, i: int) -> None:
    words[i] = 1
    atomics.fence_release()
    words[i] = 2


def _fence_full(words: Any, i: int) -> int:
    words[i] = 1
    atomics.fence_full()
    return words[i + 1]


def _spin(words: Any, i: int) -> None:
    while atomics.load_acquire(words, i) == 0:
        pass


_IR: dict[str, str] = {}


def _assembly(function: Callable[..., Any], triple: str, features: str = "") -> str:
    """The assembly of `function` for another machine, from Numba's own optimised IR."""
    name = function.__name__
    if name not in _IR:
        compiled = numba.njit(nogil=True)(function)
        compiled.compile((numba.int64[::1], numba.int64))
        whole = compiled.inspect_llvm(compiled.signatures[0])
        # The kernel alone: what CPython calls comes after it, and attributes name this CPU.
        definition = re.search(r"^define [\s\S]*?^}", whole, re.MULTILINE)
        assert definition
        _IR[name] = re.sub(r" #\d+|, ![\w.]+ !\d+", "", definition[0])
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(triple)
    machine = target.create_target_machine(opt=3, features=features, codemodel="default")
    return machine.emit_assembly(llvm.parse_assembly(f'target triple = "{triple}"\n{_IR[name]}'))


X86 = "x86_64-unknown-linux-gnu"
ARM = "aarch64-unknown-linux-gnu"


@pytest.mark.parametrize(
    ("function", "x86", "arm"),
    [
        (_load_acquire, r"movq\s+\(%r\w+,%r\w+,8\), %rax", r"\bldap?r\s+x"),
        (_store_release, r"movq\s+\$7, \(%r\w+,%r\w+,8\)", r"\bstlr\s+x"),
        (_fence_acquire, r"#MEMBARRIER", r"\bdmb\s+ishld"),
        (_fence_release, r"#MEMBARRIER", r"\bdmb\s+ish\b"),
        (_fence_full, r"\bmfence\b|\block\s+orq?", r"\bdmb\s+ish\b"),
        (_spin, r"\bcmpq\s+\$0, \(%r\w+,%r\w+,8\)\n\s+je|testq[\s\S]*j", r"\bldap?r\s+x"),
    ],
)
def test_the_assembly_has_the_instructions_that_order_it(
    function: Callable[..., Any], x86: str, arm: str
) -> None:
    on_x86, on_arm = _assembly(function, X86), _assembly(function, ARM)
    assert re.search(x86, on_x86), on_x86
    assert re.search(arm, on_arm), on_arm


@pytest.mark.parametrize("function", [_load_relaxed, _store_relaxed])
def test_relaxed_access_has_no_barrier(function: Callable[..., Any]) -> None:
    assert not re.search(r"\b(ldap?r|stlr|dmb)\b", _assembly(function, ARM))
    assert not re.search(r"\b(lock|mfence)\b", _assembly(function, X86))


@kernel
def _access_kernel(words: Any, results: Any) -> None:
    atomics.store_release(words, 2, -3)
    atomics.store_relaxed(words, 3, -4)
    results[0] = atomics.load_acquire(words, 2)
    results[1] = atomics.load_relaxed(words, 3)


def test_what_is_stored_is_loaded() -> None:
    words, results = np.array([1, 2, 0, 0]), np.zeros(2, np.int64)
    _access_kernel(words, results)
    assert words.tolist() == [1, 2, -3, -4]
    assert results.tolist() == [-3, -4]


@kernel
def _copy_kernel(target: Any, target_offset: int, source: Any, source_offset: int, n: int) -> None:
    atomics.copy_bytes(target, target_offset, source, source_offset, n)


@kernel
def _stream_kernel(
    target: Any, target_offset: int, source: Any, source_offset: int, n: int
) -> None:
    atomics.stream_bytes(target, target_offset, source, source_offset, n)


@pytest.mark.parametrize("copy", [_copy_kernel, _stream_kernel])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 100, 127, 128, 129, 191, 192, 255, 7056])
def test_copies_touch_only_the_given_bytes(copy: Callable[..., Any], n: int) -> None:
    source = np.random.default_rng(n).integers(1, 255, 8000).astype(np.uint8)
    for from_line in (0, 3, 64):
        target = np.zeros(8000, np.uint8)
        place = from_line + 64 - target.ctypes.data % 64
        copy(target, place, source, 11, n)
        expected = np.zeros(8000, np.uint8)
        expected[place : place + n] = source[11 : 11 + n]
        np.testing.assert_array_equal(target, expected)


def test_hints_to_the_memory_are_in_the_code() -> None:
    for copy, hint in ((_stream_kernel, "!nontemporal"), (_compare_kernel, "@llvm.prefetch")):
        compiled = numba.njit(copy.py_func)
        data = np.zeros(2000, np.uint8)
        compiled(data[:1000], 0, data[1000:], 0, 200)
        assert hint in compiled.inspect_llvm(compiled.signatures[0])


@kernel
def _compare_kernel(a: Any, a_offset: int, b: Any, b_offset: int, n: int) -> int:
    atomics.prefetch(a, a_offset + 1_000_000)
    return atomics.compare_bytes(a, a_offset, b, b_offset, n)


def test_compare_bytes_finds_one_differing_byte() -> None:
    a = np.random.default_rng(0).integers(0, 255, 300).astype(np.uint8)
    b = np.concatenate([np.zeros(5, np.uint8), a])
    assert _compare_kernel(a, 10, b, 15, 200) == 0
    b[15 + 200] ^= 1
    b[14] ^= 1
    assert _compare_kernel(a, 10, b, 15, 200) == 0
    assert _compare_kernel(a, 10, b, 15, 0) == 0
    for place in (0, 63, 64, 199):
        c = b.copy()
        c[15 + place] ^= 1
        assert _compare_kernel(a, 10, c, 15, 200) != 0


@pytest.mark.parametrize(
    "array", [np.zeros(4, np.int32), np.zeros((2, 2), np.int64), np.zeros(8, np.int64)[::2]]
)
def test_arrays_that_are_not_contiguous_words_do_not_compile(array: Any) -> None:
    with pytest.raises(
        TypingError, match="words must be an aligned, one-dimensional, C-contiguous"
    ):
        numba.njit(_load_acquire)(array, 0)


def test_a_float_index_does_not_compile() -> None:
    with pytest.raises(TypingError, match="i must be an integer"):
        numba.njit(_load_acquire)(np.zeros(4, np.int64), 1.0)


def test_without_jit_the_operations_mean_the_same() -> None:
    code = (
        "from tests.machine.test_atomics import *\n"
        "from tests.machine.test_atomics import _access_kernel, _copy_kernel, _stream_kernel\n"
        "test_what_is_stored_is_loaded()\n"
        "test_copies_touch_only_the_given_bytes(_copy_kernel, 100)\n"
        "test_copies_touch_only_the_given_bytes(_stream_kernel, 200)\n"
        "test_compare_bytes_finds_one_differing_byte()\n"
    )
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
