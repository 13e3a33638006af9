"""What a run needs of this machine, what the machine has, and the command that fixes it.

    findings = check(required_bytes=layout_bytes, processes=4, cuda_visible_devices=...)
    demand(findings)              # before any process starts: one clear ConfigError
    doctor(findings)              # or a table of all of them

Changes nothing but this process's limit of open files; imports neither torch nor numba.
"""

import contextlib
import dataclasses
import errno
import fcntl
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from zapex.config.presets import LIGHT_PROCESS_BYTES, PROCESS_BYTES
from zapex.errors import ConfigError, PeerError, Refused, ZapexError
from zapex.fstack import Setup
from zapex.host.parts import PARTS, PartName
from zapex.machine.gpu import Gpu
from zapex.machine.resources import Machine, memory_fact, open_files_limit, tasks_room
from zapex.net import addresses

_PROCESS_ADDRESSES_BYTES = 4 << 30  # libraries and stacks map far more than they touch
_DESCRIPTORS = 96  # segments, sockets, logs, recorders, what libraries open
_DESCRIPTORS_PER_PROCESS = 2  # the parent has a pidfd and an eventfd of each
_THREADS_PER_PROCESS = 8  # of the libraries, the emulators, the terminal
_ANSWER_S = 5.0
_LIMITS = {
    errno.EMFILE: "raise the limit of open files, `ulimit -n`",
    errno.ENFILE: "the whole machine has too many open files",
    errno.EAGAIN: "too many processes: raise `ulimit -u`, or in a container --pids-limit",
    errno.ENOMEM: "no memory for another process",
    errno.ENOSPC: "the disk of the run's directory is full",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was checked; `hint` says how to get what is needed, or would be better."""

    what: str
    found: str
    enough: bool = True
    needed: str = ""
    hint: str = ""

    @property
    def verdict(self) -> str:
        """ "ok", "could be better" or "lacking"."""
        if not self.enough:
            return "lacking"
        return "could be better" if self.hint else "ok"

    def __str__(self) -> str:
        needed = f"; needed: {self.needed}" if self.needed and self.verdict != "ok" else ""
        hint = f"; to fix it: {self.hint}" if self.hint else ""
        return f"{self.what}: {self.found}{needed}{hint}"


def check(
    required_bytes: int,
    processes: int,
    *,
    cuda_visible_devices: str | None = None,
    huge_pages: bool = False,
    cuda: bool = False,
    gpu: Gpu | None = None,
    without_torch: int = 0,
    root: Path = Path("/"),
) -> list[Finding]:
    """Check everything that a run needs of the machine.

    Args:
        required_bytes: shared memory of the run.
        processes: of the run, the parent included.
        cuda_visible_devices: the environment variable of that name, if it is set.
        huge_pages: whether the run uses them.
        cuda: whether the run asks for a GPU.
        gpu: what torch reports; None: no role would use a GPU, so torch was not asked.
        without_torch: how many of the processes don't load torch; they are smaller.
        root: the directory of /proc, /sys and /dev.
    """
    machine = dataclasses.replace(Machine.look(cuda_visible_devices, root), gpu=gpu)
    private_bytes = (processes - without_torch) * PROCESS_BYTES
    private_bytes += without_torch * LIGHT_PROCESS_BYTES
    return [
        # Huge pages are reserved: free memory does not include them.
        _memory(machine, 0 if huge_pages else required_bytes, private_bytes, processes),
        *_limits(required_bytes, processes),
        _tasks(processes, root),
        _cores(machine, processes),
        _huge_pages(required_bytes, huge_pages, root),
        _kernel(),
        _kernel_cache(),
        _cuda(machine, cuda_visible_devices, cuda, root),
    ]


def check_link(
    part: PartName,
    url: str,
    keys: str,
    insecure_network: bool,
    timeout_s: float = _ANSWER_S,
    fstack: Setup | None = None,
) -> list[Finding]:
    """Check what one of several hosts also needs: its keys, and the replay's address.

    Args:
        part: what runs on this host.
        url: where it listens, or where the replay does.
        keys: the directory of its keys; "": none.
        insecure_network: whether it may go without keys.
        timeout_s: how long the replay may take to answer.
        fstack: the setup for an fstack:// address.

    Raises:
        ConfigError: the URL is not valid.
    """
    from zapex.net.addresses import check_free
    from zapex.net.keys import Security

    flag, role = f"--{PARTS[part].address}", PARTS[part].linked or ""
    address = addresses.parse(url, flag)
    wanted = f"{role}.key and public.json, or an address of this machine"
    try:
        Security.load(keys, role, insecure_network).check(url, flag)
        own = Finding("keys", f"{role}.key in {keys}" if keys else "none", True, wanted)
    except ConfigError as error:
        own = Finding("keys", "not usable", False, wanted, str(error))
    try:
        if PARTS[part].listens:
            check_free(url, fstack)
            return [own, Finding("address", f"{url} is free")]
        addresses.check_known(address)
    except ConfigError as error:
        return [own, Finding("address", "cannot be used", False, url, str(error))]
    answer = _answer(address, bool(keys), timeout_s)
    if keys and own.enough and answer.enough and not _admits(url, keys, role, timeout_s):
        found = f"does not admit the key in {keys}"
        hint = f"copy {role}.key and public.json from the replay's own `zapex keygen` directory"
        return [own, Finding("replay", found, False, "keys of one set", hint)]
    return [own, answer]


def _admits(url: str, keys: str, role: str, timeout_s: float) -> bool:
    """Whether a replay accepts this key. Its hello must be refused: a role may already run."""
    from zapex.net.keys import Security
    from zapex.net.link import ZmqLink

    security = Security.load(keys, role, False)
    link = ZmqLink(url, role, 1, 1, None, {}, security, schema_hash=0)
    try:
        link.open(timeout_s)
    except Refused:
        return True
    except PeerError:
        return False
    finally:
        link.close()
    return True


def _answer(address: addresses.Address, encrypted: bool, timeout_s: float) -> Finding:
    """Whether a replay answers and expects the keys that this host has."""
    needed = "a replay " + ("with keys" if encrypted else "without keys")
    try:
        found = addresses.mechanism(address, timeout_s)
    except ConnectionError as error:
        hint = f"start `zapex replay --listen` at {address.url}, and check firewalls in between"
        return Finding("replay", str(error), False, needed, hint)
    has_keys = found == "CURVE"
    fits = has_keys == encrypted
    hint = "leave --keys out" if encrypted else "give --keys DIR, made by `zapex keygen`"
    found = "answers, and has " + ("keys" if has_keys else "no keys")
    return Finding("replay", found, fits, needed, "" if fits else hint)


def demand(findings: Sequence[Finding]) -> None:
    """Raise ConfigError with everything that is lacking, if anything is."""
    wrong = [str(finding) for finding in findings if not finding.enough]
    if wrong:
        raise ConfigError("this machine lacks something that the run needs. " + ". ".join(wrong))


@contextlib.contextmanager
def limits_explained() -> Iterator[None]:
    """Turn an error from a system limit into one line that says how to raise the limit."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ZapexError) or error.errno not in _LIMITS:
            raise
        raise ZapexError(f"{error.strerror}: {_LIMITS[error.errno]}; see `zapex doctor`") from error


def doctor(findings: Sequence[Finding]) -> int:
    """Print the findings as a table. Returns the exit code: 1 if something is lacking."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "could be better": "yellow", "lacking": "bold red"}
    table = Table(box=box.SIMPLE)
    for heading in ("", "what", "found", "needed"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        verdict = Text(finding.verdict, style=colours[finding.verdict])
        table.add_row(verdict, finding.what, Text(finding.found), Text(finding.needed))
    Console().print(table)
    for finding in findings:
        if finding.hint:  # not in the table, where a wrapped command could not be copied
            print(f"{finding.what}: {finding.hint}")
    wrong = [finding.what for finding in findings if not finding.enough]
    print(f"Lacking: {', '.join(wrong)}" if wrong else "This machine has everything it needs.")
    return 1 if wrong else 0


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


def _memory(machine: Machine, shared_bytes: int, private_bytes: int, processes: int) -> Finding:
    """The hint names what takes the memory: the replay, or the processes."""
    free_bytes, needed_bytes = machine.memory_bytes, shared_bytes + private_bytes
    left_bytes = int(0.9 * free_bytes) - private_bytes
    if free_bytes >= needed_bytes:
        hint = ""
    elif left_bytes > 0:
        hint = f"lower --capacity to {100 * left_bytes // shared_bytes} % of its value"
    else:
        most = max(1, int(0.9 * free_bytes) * processes // needed_bytes)
        hint = f"{processes} processes are too many, about {most} fit: lower --actors"
    if hint:
        hint += f"; in a container: docker run --memory {(needed_bytes >> 30) + 2}g"
    found = f"{_gib(free_bytes)} free"
    return Finding("memory", found, free_bytes >= needed_bytes, _gib(needed_bytes), hint)


def _limits(required_bytes: int, processes: int) -> Iterator[Finding]:
    """Limits of `ulimit`: descriptors, address space, and file size, which limits a memfd too."""
    descriptors = _DESCRIPTORS + _DESCRIPTORS_PER_PROCESS * processes
    addresses = required_bytes + _PROCESS_ADDRESSES_BYTES
    open_files_limit()
    for what, name, option, unit, needed in (
        ("open files", "NOFILE", "n", 1, descriptors),
        ("address space", "AS", "v", 1024, addresses),
        ("file size", "FSIZE", "f", 1024, required_bytes),
    ):
        soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        enough = soft == resource.RLIM_INFINITY or soft >= needed
        hint = ""
        if not enough and (hard == resource.RLIM_INFINITY or hard >= needed):
            hint = f"ulimit -S{option} {-(-needed // unit)}"
        elif not enough:
            hint = f"sudo prlimit --pid $$ --{name.lower()}={needed}:{needed}"
        shown = str if unit == 1 else _gib
        found = "unlimited" if soft == resource.RLIM_INFINITY else shown(soft)
        yield Finding(what, found, enough, shown(needed), hint)


def _tasks(processes: int, root: Path) -> Finding:
    """A container's limit; a user's counts all processes of that user, wherever they run."""
    room, needed = tasks_room(root), _THREADS_PER_PROCESS * processes
    found = "unlimited" if room is None else f"room for {room} more"
    enough = room is None or room >= needed
    hint = "" if enough else "in a container: docker run --pids-limit -1"
    return Finding("processes", found, enough, f"{needed}, threads included", hint)


def _cores(machine: Machine, processes: int) -> Finding:
    present = os.cpu_count() or machine.cores
    hint = ""
    if machine.cores < 2 <= present:
        hint = f"taskset -apc 0-{present - 1} $$; in a container: docker run --cpus {present}"
    threads = f" with {machine.smt} threads each" if machine.smt > 1 else ""
    found = f"{machine.cores}{threads} available, of {present} hardware threads"
    # The parent and the replay sleep most of the time; actors and the learner do not.
    return Finding("cores", found, True, f"2 for {processes} processes to be fast", hint)


def _huge_pages(required_bytes: int, asked_for: bool, root: Path) -> Finding:
    page_bytes = memory_fact("Hugepagesize", root)
    free = memory_fact("HugePages_Free", root)
    found = f"{free} free of {page_bytes >> 20} MiB each" if page_bytes else "none in this kernel"
    if not asked_for:
        return Finding("huge pages", found, True, "none: the run does not use them")
    needed = -(-required_bytes // page_bytes) if page_bytes else 0
    enough = page_bytes > 0 and free >= needed
    hint = "" if enough else f"sudo sysctl vm.nr_hugepages={needed}"
    return Finding("huge pages", found, enough, str(needed), hint)


def _kernel() -> Finding:
    """Try features instead of comparing versions: a sandbox may forbid what the kernel offers."""
    opened: list[int] = []
    needed = "memfd with seals, pidfd and eventfd: Linux 5.3 or newer"
    try:
        opened.append(os.memfd_create("zapex doctor", os.MFD_ALLOW_SEALING))
        fcntl.fcntl(opened[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        opened.append(os.pidfd_open(os.getpid()))
        opened.append(os.eventfd(0))
    except OSError as error:
        what = ("memfd", "pidfd", "eventfd")[len(opened)]
        found = f"Linux {os.uname().release} refuses {what}: {error.strerror}"
        hint = "in a container: docker run --security-opt seccomp=unconfined"
        return Finding("kernel", found, False, needed, hint)
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return Finding("kernel", f"Linux {os.uname().release}", True, needed)


def _kernel_cache() -> Finding:
    from zapex.machine import jit

    if jit.CACHE_DIRECTORY is not None:
        return Finding("kernel cache", str(jit.CACHE_DIRECTORY))
    found = "no writable directory: kernels are compiled at every start"
    hint = "mkdir -p -m 700 ~/.cache && chmod u+w ~/.cache, or export XDG_CACHE_HOME=DIRECTORY"
    return Finding("kernel cache", found, True, "a directory owned by you", hint)


def _cuda(
    machine: Machine, cuda_visible_devices: str | None, required: bool, root: Path
) -> Finding:
    needed = "one that torch can use" if required else "none: the learner uses the CPU"
    instead = ", or --device cpu and --inference cpu" if required else ""
    if machine.gpus and machine.gpu is None:
        return Finding("GPU", f"{machine.gpus} NVIDIA GPU(s); no role uses one")
    if machine.gpus and machine.gpu is not None:
        gpu = machine.gpu
        hint = gpu.hint and gpu.hint + instead
        return Finding("GPU", str(gpu), not (gpu.problem and required), needed, hint)
    hidden = Machine.look(None, root).gpus
    if hidden:
        found = f"{hidden}, hidden by CUDA_VISIBLE_DEVICES={cuda_visible_devices}"
        return Finding("GPU", found, not required, needed, f"unset CUDA_VISIBLE_DEVICES{instead}")
    hint = "--device cpu, or auto, and --inference cpu" if required else ""
    return Finding("GPU", "none", not required, needed, hint)
