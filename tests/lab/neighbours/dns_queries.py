# SPDX-License-Identifier: Apache-2.0
"""Asks a DNS server for the address of a name every few milliseconds, by UDP and by TCP in turn,
each time with a new socket. A program of its own, so that it runs in the network namespace and
cgroup of a client: `dns_queries.py SERVER NAME SECONDS PATIENCE`. After SECONDS without an answer
it asks again, but the query counts as lost only after PATIENCE: a busy machine answers late.

Each line of its output is the time of a query (CLOCK_MONOTONIC), the protocol, and `asked`; or
later the address that was answered, or the error.
"""

import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

PORT = 53
PAUSE_S = 0.01
MAX_WAITING = 500
"""Queries that may wait for an answer at a time."""


def make_query(number: int, name: str) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!6H", number, 0x0100, 1, 0, 0, 0) + labels + struct.pack("!BHH", 0, 1, 1)


def parse_answer(number: int, message: bytes) -> str:
    """The address of the last record, which is the only one."""
    received, flags, _, answers = struct.unpack_from("!4H", message)
    assert received == number
    return socket.inet_ntoa(message[-4:]) if answers else f"rcode-{flags & 0xF}"


def ask(protocol: str, server: str, number: int, name: str, seconds: float) -> str:
    query = make_query(number, name)
    kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    try:
        with socket.socket(socket.AF_INET, kind) as s:
            s.settimeout(seconds)
            s.connect((server, PORT))
            if protocol == "udp":
                s.send(query)
                return parse_answer(number, s.recv(4096))
            s.sendall(struct.pack("!H", len(query)) + query)
            message = s.recv(4096)
            while len(message) < 2 or len(message) < 2 + int.from_bytes(message[:2], "big"):
                piece = s.recv(4096)
                if not piece:
                    return "closed"
                message += piece
            return parse_answer(number, message[2:])
    except OSError as error:
        return type(error).__name__


def main() -> None:
    server, name, seconds, patience = sys.argv[1:]
    lock = threading.Lock()

    def tell(*words: object) -> None:
        with lock:
            print(*words, flush=True)

    def run(protocol: str, number: int) -> None:
        asked_at = time.monotonic()
        tell(asked_at, protocol, "asked")
        tell(asked_at, protocol, ask(protocol, server, number, name, float(patience)))

    number = 0
    with ThreadPoolExecutor(MAX_WAITING) as pool:
        while True:
            for protocol in ("udp", "tcp"):
                number = (number + 1) % 0x10000
                wait([pool.submit(run, protocol, number)], float(seconds))
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
