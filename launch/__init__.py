"""How processes start and end: the environment, the ranks of a machine, their sources, what they say, signals.

environment.py and start.py are programs, for run.sh and test.sh, and import nothing of ours; a script imports the others.
"""

import os

# Before PyTorch loads OpenMP. Threads that wait by spinning take a core from the thread that they wait for as soon as another
# process computes: 200 small operations of two threads beside one such process took 1,895 and 3,544 ms, so 87 and 204 ms.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# PyTorch leaves parts of a product unwritten where OpenMP gives it fewer threads than it asks for: as by the machine's load.
for name in ("OMP_DYNAMIC", "OMP_MAX_ACTIVE_LEVELS"):
    os.environ.pop(name, None)
if (limit := os.environ.get("OMP_THREAD_LIMIT", "")).isdigit():  # launch/machine.py asks for no more in a run
    given = os.environ.get("OMP_NUM_THREADS", "")
    os.environ["OMP_NUM_THREADS"] = f"{min(int(limit), int(given) if given.isdigit() else int(limit))}"
