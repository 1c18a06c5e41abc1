"""The client of the demo: `python -m kbpf.demo.client ADDRESS TCP-PORT UDP-PORT REQUESTS RATE`.

It knows the Service's address and nothing else; its network namespace has a route to the backends
and none to the Service. Each request is a new connection, each tenth is a datagram. It first waits
until the Service answers. REQUESTS 0 means for ever, RATE 0 as fast as it goes. Lines of tally.py
go to stdout.
"""

import errno
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from kbpf.demo.report import Report, Tally, encode

TIMEOUT_SECONDS: Final = 5.0
REPORT_SECONDS: Final = 0.2
EACH_UDP: Final = 10

Place = tuple[str, int]


def ask_tcp(to: Place) -> str:
    """One HTTP request over a connection of its own; the backend's name."""
    with socket.create_connection(to, timeout=TIMEOUT_SECONDS) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with connection.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.0 200 "):
        raise OSError(errno.EPROTO, "not an HTTP answer")
    return body.decode().strip()


def ask_udp(to: Place) -> str:
    """One datagram from a socket of its own; the backend's name. The answer must come from the
    Service's address, not from the backend's.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(TIMEOUT_SECONDS)
        asking.sendto(b"?", to)
        name, answered_by = asking.recvfrom(4096)
    if answered_by != to:
        raise OSError(errno.EADDRNOTAVAIL, "the answer came from another address")
    return name.decode()


class Count:
    """Counts until it is taken."""

    def __init__(self) -> None:
        self._answered: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def ask(self, ask: Callable[[Place], str], to: Place) -> None:
        """Asks once."""
        try:
            self._answered[ask(to)] += 1
        except TimeoutError:
            self._failed["timeout"] += 1
        except OSError as error:
            self._failed[errno.errorcode.get(error.errno or 0, type(error).__name__)] += 1

    def take(self) -> Tally:
        """What was counted since the last time."""
        tally = Tally(dict(self._answered), dict(self._failed))
        self._answered.clear()
        self._failed.clear()
        return tally


def say(report: Report) -> None:
    """To whoever started us."""
    print(encode(report), flush=True)


def wait_until_served(ask: Callable[[Place], str], to: Place) -> None:
    """Before the agent has attached the hooks that this takes, there is no route to the Service, or
    the answer is its backend's. It attaches one after the other, those of UDP behind TCP's.
    """
    while True:
        try:
            ask(to)
        except OSError:
            time.sleep(0.02)
        else:
            return


def ask_many(address: str, tcp_port: int, udp_port: int, requests: int, rate: float) -> None:
    """All requests, in one thread, one after the other."""
    web, dns = (address, tcp_port), (address, udp_port)
    wait_until_served(ask_tcp, web)
    wait_until_served(ask_udp, dns)
    say(Report())
    tcp, udp = Count(), Count()
    began = last = time.monotonic()
    number = 0
    while not requests or number < requests:
        number += 1
        tcp.ask(ask_tcp, web)
        if number % EACH_UDP == 0:
            udp.ask(ask_udp, dns)
        now = time.monotonic()
        if now - last >= REPORT_SECONDS:
            say(Report(tcp.take(), udp.take(), now - last))
            last = now
        if rate:
            time.sleep(max(0.0, began + number / rate - now))
            if now - began - number / rate > 1.0:
                began = now - number / rate  # it was held up: go on, don't catch up
    say(Report(tcp.take(), udp.take(), time.monotonic() - last, done=True))


if __name__ == "__main__":
    ask_many(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
