"""Dials HOST PORT until a server answers, then prints when that was (CLOCK_BOOTTIME). A line before
says that it has begun. Each attempt has 20 ms, so it is as exact as that. Imports nothing of kbpf.
"""

import select
import socket
import sys
import time

ATTEMPT_SECONDS = 0.02


def answers(host: str, port: int) -> bool:
    """Whether a connection came about within ATTEMPT_SECONDS."""
    with socket.socket() as dialer:
        dialer.setblocking(False)
        try:
            dialer.connect((host, port))
        except BlockingIOError:
            pass
        except OSError:
            time.sleep(ATTEMPT_SECONDS)  # refused: an answer, and not the one that is wanted
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
