# SPDX-License-Identifier: Apache-2.0
"""A client of the demo: `python -m kbpf.demo.client ADDRESS TCP-PORT UDP-PORT REQUESTS RATE WAITS`.

The client knows only the Service's address. Its network namespace has no route to the Service, or
none to the backends. Each request is a new TCP connection; after every tenth it also sends a
datagram, unless UDP-PORT is 0. REQUESTS: how many, 0 for no end. RATE: requests a second, 0 for as
fast as possible. WAITS: 1 to wait until the Service answers, 0 to count failures from the first
request on. It prints reports (report.py), one a line, the last one after REQUESTS or SIGTERM.
"""

import errno
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from kbpf.demo.report import ClientReport, RequestCounts, encode

REQUEST_TIMEOUT_S: Final = 20.0
"""A busy machine may stop a backend for some seconds, which is not a failed connection."""
REPORT_INTERVAL_S: Final = 0.2
REQUESTS_PER_DATAGRAM: Final = 10

ServiceAddress = tuple[str, int]


class Answer(NamedTuple):
    """`connect_us`: the microseconds that connect() took; None of a datagram."""

    backend: str
    connect_us: int | None = None


def request_tcp(address: ServiceAddress) -> Answer:
    """Sends one HTTP request over a new connection."""
    with socket.socket() as connection:
        connection.settimeout(REQUEST_TIMEOUT_S)
        start = time.perf_counter_ns()
        connection.connect(address)
        connect_us = (time.perf_counter_ns() - start) // 1000
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with connection.makefile("rb") as response:
            head, _, body = response.read().partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.0 200 "):
        raise OSError(errno.EPROTO, "not an HTTP response")
    return Answer(body.decode().strip(), connect_us)


def request_udp(address: ServiceAddress) -> Answer:
    """Sends one datagram from a new socket. Raises OSError if the answer does not come from the
    Service's address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(REQUEST_TIMEOUT_S)
        client.sendto(b"?", address)
        name, sender = client.recvfrom(4096)
    if sender != address:
        raise OSError(errno.EADDRNOTAVAIL, "the answer came from another address")
    return Answer(name.decode())


class RequestCounter:
    """Sends requests and counts their results."""

    def __init__(self) -> None:
        self._answers: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._connect_us: Counter[int] = Counter()

    def request(self, send: Callable[[ServiceAddress], Answer], address: ServiceAddress) -> None:
        """Sends one request and counts the backend that answered, or the error."""
        try:
            answer = send(address)
            self._answers[answer.backend] += 1
            if answer.connect_us is not None:
                self._connect_us[answer.connect_us] += 1
        except TimeoutError:
            self._failures["timeout"] += 1
        except OSError as error:
            self._failures[errno.errorcode.get(error.errno or 0, type(error).__name__)] += 1

    def pop(self) -> RequestCounts:
        """Returns the counts since the last call."""
        counts = RequestCounts(dict(self._answers), dict(self._failures), dict(self._connect_us))
        for counter in (self._answers, self._failures, self._connect_us):
            counter.clear()
        return counts


def print_report(report: ClientReport) -> None:
    """Prints a report for the process that started the client."""
    print(encode(report), flush=True)


def wait_until_served(send: Callable[[ServiceAddress], Answer], address: ServiceAddress) -> None:
    """Sends requests until one succeeds.

    Until the agent has attached the hooks for this protocol, there is no route to the Service, or
    an answer has the backend's address. Hooks are attached one after the other, UDP after TCP.
    """
    while True:
        try:
            send(address)
        except OSError:
            time.sleep(0.02)
        else:
            return


def run_client(
    address: str, tcp_port: int, udp_port: int, requests: int, rate: float, waits: bool
) -> None:
    """Sends all requests, one after the other, and prints a report every REPORT_INTERVAL_S."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    web, dns = (address, tcp_port), (address, udp_port)
    if waits:
        wait_until_served(request_tcp, web)
        if udp_port:
            wait_until_served(request_udp, dns)
    print_report(ClientReport())
    tcp, udp = RequestCounter(), RequestCounter()
    start = last_report = time.monotonic()
    number = 0
    while not signals and (not requests or number < requests):
        number += 1
        tcp.request(request_tcp, web)
        if udp_port and number % REQUESTS_PER_DATAGRAM == 0:
            udp.request(request_udp, dns)
        now = time.monotonic()
        if now - last_report >= REPORT_INTERVAL_S:
            print_report(ClientReport(tcp.pop(), udp.pop(), now - last_report, start=last_report))
            last_report = now
        if rate:
            time.sleep(max(0.0, start + number / rate - now))
            if now - start - number / rate > 1.0:
                start = now - number / rate  # it was delayed: continue at `rate`, not faster
    seconds = time.monotonic() - last_report
    print_report(ClientReport(tcp.pop(), udp.pop(), seconds, is_last=True, start=last_report))


if __name__ == "__main__":
    run_client(
        sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]),
        sys.argv[6] == "1",
    )  # fmt: skip
