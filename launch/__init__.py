"""How processes start and end: the environment, the ranks of a machine, their sources, what they say, signals.

environment.py and start.py are programs, for run.sh and test.sh, and import nothing of ours; a script imports the others.
"""

import contextlib
import os
import signal

GIVEN = {**os.environ}  # at the start
OF_VARIABLES = "variables", "read by its sources"  # how the lines of a log that tell of them begin

with contextlib.suppress(ValueError):  # not in the main thread
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # as by a parent: a killed child's code would read 0
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
# Before PyTorch loads OpenMP. Threads that wait by spinning take a core from the thread that they wait for as soon as another
# process computes: 200 small operations of two threads beside one such process took 1,895 and 3,544 ms, so 87 and 204 ms.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# PyTorch leaves parts of a product unwritten where OpenMP gives it fewer threads than it asks for: as by the machine's load.
os.environ.pop("OMP_DYNAMIC", None)
os.environ.pop("OMP_MAX_ACTIVE_LEVELS", None)


def threads_at_most(name: str = "OMP_THREAD_LIMIT") -> "int | None":  # quoted for a Python too old, which is to be told
    """What a variable of OpenMP's says, if it is a number of threads."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


if limit := threads_at_most():  # in a run launch/machine.py asks for no more
    os.environ["OMP_NUM_THREADS"] = f"{min(limit, threads_at_most('OMP_NUM_THREADS') or limit)}"
