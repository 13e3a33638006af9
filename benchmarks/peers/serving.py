"""The process of one contender: says whether it is there, then works when told to.

Runs under any Python that has numpy and the contender. Its standard output says "ready VERSION
RESIDENT_BYTES" or "missing REASON", then answers each line of numbers on standard input with a JSON
list of rows of nanoseconds (benchmarks/support/contenders.py is the other end).
"""

import json
import os
import sys
from importlib import metadata

import numpy as np


def serve(contenders, measure):
    """Serve the contender that the command line names: NAME CAPACITY SWEEP_BYTES.

    measure(contender, sweep, *numbers): the rows; sweep() pushes everything out of the caches.
    """
    name, capacity, sweep_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some libraries log to where the answers go
    try:
        contender = contenders[name](capacity)
    except Exception as error:  # whatever it is, it is the reason why this one does not take part
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        print("missing", reason, file=answers, flush=True)
        return
    version = "-" if contender.package == "zapex" else metadata.version(contender.package)
    with open("/proc/self/statm", "rb") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    print("ready", version, resident, file=answers, flush=True)
    memory = np.zeros(sweep_bytes // 8)

    def sweep():
        np.add(memory, 1.0, out=memory)

    for line in sys.stdin:
        rows = measure(contender, sweep, *(int(word) for word in line.split()))
        print(json.dumps(rows), file=answers, flush=True)
