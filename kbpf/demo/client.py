# SPDX-License-Identifier: Apache-2.0
"""The client of the demo: `python -m kbpf.demo.client ADDRESS TCP-PORT UDP-PORT REQUESTS RATE`.

The client knows only the Service's address. Its network namespace has a route to the backends and
none to the Service. Each request is a new TCP connection; after every tenth it also sends a
datagram. It first waits until the Service answers. REQUESTS: how many, 0 for no end. RATE: requests
a second, 0 for as fast as possible. It prints reports (report.py), one a line.
"""

import errno
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from kbpf.demo.report import ClientReport, RequestCounts, encode

REQUEST_TIMEOUT_S: Final = 5.0
REPORT_INTERVAL_S: Final = 0.2
REQUESTS_PER_DATAGRAM: Final = 10

ServiceAddress = tuple[str, int]


def request_tcp(address: ServiceAddress) -> str:
    """Sends one HTTP request over a new connection. Returns the backend's name."""
    with socket.create_connection(address, timeout=REQUEST_TIMEOUT_S) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with connection.makefile("rb") as response:
            head, _, body = response.read().partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.0 200 "):
        raise OSError(errno.EPROTO, "not an HTTP response")
    return body.decode().strip()


def request_udp(address: ServiceAddress) -> str:
    """Sends one datagram from a new socket. Returns the backend's name. Raises OSError if the
    answer does not come from the Service's address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(REQUEST_TIMEOUT_S)
        client.sendto(b"?", address)
        name, sender = client.recvfrom(4096)
    if sender != address:
        raise OSError(errno.EADDRNOTAVAIL, "the answer came from another address")
    return name.decode()


class RequestCounter:
    """Sends requests and counts their results."""

    def __init__(self) -> None:
        self._answers: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()

    def request(self, send: Callable[[ServiceAddress], str], address: ServiceAddress) -> None:
        """Sends one request and counts the backend that answered, or the error."""
        try:
            self._answers[send(address)] += 1
        except TimeoutError:
            self._failures["timeout"] += 1
        except OSError as error:
            self._failures[errno.errorcode.get(error.errno or 0, type(error).__name__)] += 1

    def pop(self) -> RequestCounts:
        """Returns the counts since the last call."""
        counts = RequestCounts(dict(self._answers), dict(self._failures))
        self._answers.clear()
        self._failures.clear()
        return counts


def print_report(report: ClientReport) -> None:
    """Prints a report for the process that started the client."""
    print(encode(report), flush=True)


def wait_until_served(send: Callable[[ServiceAddress], str], address: ServiceAddress) -> None:
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


def run_client(address: str, tcp_port: int, udp_port: int, requests: int, rate: float) -> None:
    """Sends all requests, one after the other, and prints a report every REPORT_INTERVAL_S."""
    web, dns = (address, tcp_port), (address, udp_port)
    wait_until_served(request_tcp, web)
    wait_until_served(request_udp, dns)
    print_report(ClientReport())
    tcp, udp = RequestCounter(), RequestCounter()
    start = last_report = time.monotonic()
    number = 0
    while not requests or number < requests:
        number += 1
        tcp.request(request_tcp, web)
        if number % REQUESTS_PER_DATAGRAM == 0:
            udp.request(request_udp, dns)
        now = time.monotonic()
        if now - last_report >= REPORT_INTERVAL_S:
            print_report(ClientReport(tcp.pop(), udp.pop(), now - last_report))
            last_report = now
        if rate:
            time.sleep(max(0.0, start + number / rate - now))
            if now - start - number / rate > 1.0:
                start = now - number / rate  # it was delayed: continue at `rate`, not faster
    print_report(ClientReport(tcp.pop(), udp.pop(), time.monotonic() - last_report, is_last=True))


if __name__ == "__main__":
    run_client(
        sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    )
