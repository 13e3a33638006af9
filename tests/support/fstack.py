"""F-Stack for tests: the library that the environment names, or a stand-in that is built here.

ZAPEX_FSTACK_LIB, ZAPEX_FSTACK_CONF and ZAPEX_FSTACK_EAL name a real one, as for `zapex replay`.
Its port must be one end of a link whose other end is this machine's, with the address that the
configuration names as gateway.
"""

import hashlib
import itertools
import os
import random
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from zapex.fstack import Setup
from zapex.fstack.loop import Loop, loop_of

SOURCE = Path(__file__).parents[1] / "fstack" / "standin.c"
CONFIG = """\
[dpdk]
no_huge=1
memory=64
port_list=0
idle_sleep=20
[port0]
addr=127.0.0.1
gateway=127.0.0.1
"""
PORT = "--vdev=net_af_packet0,iface=lo"
_ports = itertools.count(random.SystemRandom().randrange(20_000, 30_000))


def is_real() -> bool:
    """Whether the environment names a real library."""
    return bool(os.environ.get("ZAPEX_FSTACK_LIB") and os.environ.get("ZAPEX_FSTACK_CONF"))


@cache
def standin() -> Setup:
    """The stand-in, built once for each version of its source."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    digest = hashlib.sha256(SOURCE.read_bytes() + CONFIG.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"zapex-standin-{os.getuid()}-{digest}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(prefix="zapex-standin-") as made:
            new = Path(made) / "new"
            new.mkdir()
            (new / "config.ini").write_text(CONFIG)
            flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
            command = [compiler, *flags, "-o", str(new / "libfstack.so"), str(SOURCE)]
            subprocess.run(command, check=True, timeout=100)
            if not folder.is_dir():  # another test process may have been quicker
                shutil.move(new, folder)
    return Setup(str(folder / "libfstack.so"), str(folder / "config.ini"), PORT)


@cache
def setup() -> Setup:
    """The real library, or else the stand-in."""
    if not is_real():
        return standin()
    values = [os.environ.get(f"ZAPEX_FSTACK_{name}", "") for name in ("LIB", "CONF", "EAL")]
    return Setup(*values)


def addresses(which: Setup) -> tuple[str, str]:
    """The address of F-Stack's port, and the address of this machine that it reaches."""
    text = Path(which.config).read_text()
    found = dict(re.findall(r"^(addr|gateway)=(\S+)", text, re.MULTILINE))
    return found["addr"], found["gateway"]


def free_port() -> int:
    """A port that no test has used before: F-Stack does not choose one."""
    return next(_ports)


def url() -> str:
    """An address to listen at."""
    return f"fstack://{addresses(setup())[0]}:{free_port()}"


def in_this_process(url: str) -> Setup | None:
    """What a listener at this URL needs, once the loop runs."""
    if not url.startswith("fstack:"):
        return None
    loop()
    return setup()


@cache
def loop() -> Loop:
    """The loop of this process. DPDK has bound it to one core; clients need the others."""
    cores = os.sched_getaffinity(0)
    made = loop_of(setup())
    os.sched_setaffinity(0, cores)
    return made
