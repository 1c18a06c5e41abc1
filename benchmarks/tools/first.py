# SPDX-License-Identifier: Apache-2.0
"""`first.py HOST PORT` dials until a server accepts, then prints the time (CLOCK_BOOTTIME, in s).

It prints "begun" before the first attempt. An attempt may take 20 ms, which is the resolution of
the result. Imports nothing of kbpf, so that it starts fast.
"""

import select
import socket
import sys
import time

ATTEMPT_SECONDS = 0.02


def answers(host: str, port: int) -> bool:
    """Whether a connection was established within ATTEMPT_SECONDS."""
    with socket.socket() as dialer:
        dialer.setblocking(False)
        try:
            dialer.connect((host, port))
        except BlockingIOError:
            pass
        except OSError:
            time.sleep(ATTEMPT_SECONDS)  # refused at once: do not spin
            return False
        ready = select.poll()
        ready.register(dialer, select.POLLOUT)
        if not ready.poll(ATTEMPT_SECONDS * 1000):
            return False
        return dialer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0


if __name__ == "__main__":
    print("begun", flush=True)
    while not answers(sys.argv[1], int(sys.argv[2])):
        pass
    print(time.clock_gettime(time.CLOCK_BOOTTIME), flush=True)
