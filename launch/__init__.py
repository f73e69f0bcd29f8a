"""How processes start and end: the environment, the ranks of a machine, their sources, what they say, signals.

environment.py and start.py are programs, for run.sh and test.sh, and import nothing of ours; a script imports the others.
"""

import os

# Before PyTorch loads OpenMP. Threads that wait by spinning take a core from the thread that they wait for as soon as another
# process computes: 200 small operations of two threads beside one such process took 1,895 and 3,544 ms, so 87 and 204 ms.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
