"""What a child process asks of the kernel for itself."""

import ctypes
import os
import signal
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def die_with(parent: int) -> None:
    """From now on, and through execve(2), this process is killed when its parent ends, however it
    ends. `parent` is its id: if it has gone already, so does this process now.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
