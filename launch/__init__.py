"""How processes start and end: the environment, the ranks of a machine, their sources, what they say, signals.

environment.py and start.py are programs, for run.sh and test.sh, and import nothing of ours; a script imports the others.
"""

import contextlib
import getpass
import os
import re
import signal
import stat
import tempfile

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


def unset_if_empty(*names: str) -> None:
    """For variables that name a folder: a library would take an empty one, of a shell's variable that is not set, for the current."""
    for name in names:
        os.environ.get(name) or os.environ.pop(name, None)


unset_if_empty("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME")


def threads_at_most(name: str = "OMP_THREAD_LIMIT") -> "int | None":  # quoted for a Python too old, which is to be told
    """What a variable of OpenMP's says, if it is a number of threads."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def inductors_folder() -> str:
    """Where PyTorch's compiler keeps its code, if no variable names a folder, as it has it; its own function takes two seconds to
    import. Empty where no file can be made."""
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (ImportError, KeyError, OSError):  # without a name
        user = f"uid_{os.getuid()}"
    with contextlib.suppress(OSError):
        return os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    return ""


def others_code(make: bool = False) -> str:
    """What to say of PyTorch's folder of compiled code, which runs, if others may write there: anybody may make it in /tmp. Empty
    if a variable names another. make: it, if it is not there, so that nobody else does."""
    folder, advice = inductors_folder(), "remove it, or name another by TORCHINDUCTOR_CACHE_DIR"
    if not folder or os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return ""
    with contextlib.suppress(OSError):
        if make:
            os.mkdir(folder, 0o700)
    for look in (os.lstat, os.stat):  # of a link, then of what it leads to
        try:
            found = look(folder)
        except OSError:  # none is there, or it can be no folder, which is told where it is needed
            return ""
        if found.st_uid not in (os.geteuid(), 0):
            return f"{folder}: is of user {found.st_uid}, whose code would run as yours: {advice}"
    if found.st_mode & stat.S_IWOTH:
        return f"{folder}: may be written by anybody, whose code would run as yours: {advice}"
    return ""


if limit := threads_at_most():  # in a run launch/machine.py asks for no more
    os.environ["OMP_NUM_THREADS"] = f"{min(limit, threads_at_most('OMP_NUM_THREADS') or limit)}"
