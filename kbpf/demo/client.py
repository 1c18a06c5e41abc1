# SPDX-License-Identifier: Apache-2.0
"""A client of the demo: `python -m kbpf.demo.client ADDRESS TCP-PORT UDP-PORT REQUESTS RATE WAITS`.

The client knows only the Service's address. Its network namespace has no route to the Service, or
none to the backends. Each request is a new TCP connection; after every tenth it also sends a
datagram, unless UDP-PORT is 0. REQUESTS: how many, 0 for no end. RATE: requests a second, 0 for as
fast as possible. WAITS: 1 to wait until the Service answers, 0 to count failures from the first
request on. It prints a Request for each, as a line of JSON, until REQUESTS or SIGTERM.
"""

import errno
import signal
import socket
import sys
import time
from typing import Final

import msgspec

REQUEST_TIMEOUT_S: Final = 20.0
"""A busy machine may stop a backend for some seconds, which is not a failed connection."""
REQUESTS_PER_DATAGRAM: Final = 10

ServiceAddress = tuple[str, int]


class Request(msgspec.Struct, frozen=True):
    """A request, and what became of it. `start` and `end`: by CLOCK_MONOTONIC, which all processes
    share. `backend`: which one answered, or `error`: why it failed, and "" otherwise. `connected`:
    when connect() returned, 0 of a datagram.
    """

    start: float
    end: float
    is_udp: bool = False
    backend: str = ""
    error: str = ""
    connected: float = 0.0


def request_tcp(address: ServiceAddress) -> Request:
    """Sends one HTTP request over a new connection. Raises OSError."""
    start = time.monotonic()
    with socket.socket() as connection:
        connection.settimeout(REQUEST_TIMEOUT_S)
        connection.connect(address)
        connected = time.monotonic()
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with connection.makefile("rb") as response:
            head, _, body = response.read().partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.0 200 "):
        raise OSError(errno.EPROTO, "not an HTTP response")
    return Request(start, time.monotonic(), False, body.decode().strip(), connected=connected)


def request_udp(address: ServiceAddress) -> Request:
    """Sends one datagram from a new socket. Raises OSError if the answer does not come from the
    Service's address.
    """
    start = time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(REQUEST_TIMEOUT_S)
        client.sendto(b"?", address)
        name, sender = client.recvfrom(4096)
    if sender != address:
        raise OSError(errno.EADDRNOTAVAIL, "the answer came from another address")
    return Request(start, time.monotonic(), True, name.decode())


def request(address: ServiceAddress, is_udp: bool) -> Request:
    """Sends one request. An error is its result."""
    start = time.monotonic()
    try:
        return (request_udp if is_udp else request_tcp)(address)
    except TimeoutError:
        error = "timeout"
    except OSError as failure:
        error = errno.errorcode.get(failure.errno or 0, type(failure).__name__)
    return Request(start, time.monotonic(), is_udp, error=error)


def run_client(address: str, tcp_port: int, udp_port: int, requests: int, rate: float, waits: bool) -> None:
    """Sends all requests, one after the other."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    ports = {False: tcp_port} | ({True: udp_port} if udp_port else {})
    if waits:
        # Until the agent has attached the hooks for a protocol, there is no route to the Service,
        # or an answer has the backend's address. Those for UDP come after those for TCP.
        for is_udp, port in ports.items():
            while request((address, port), is_udp).error:
                time.sleep(0.02)
    start = time.monotonic()
    number = 0
    while not signals and (not requests or number < requests):
        number += 1
        for is_udp, port in ports.items():
            if not is_udp or number % REQUESTS_PER_DATAGRAM == 0:
                made = request((address, port), is_udp)
                print(msgspec.json.encode(made).decode(), flush=True)
        if rate:
            ahead = start + number / rate - time.monotonic()
            time.sleep(max(0.0, ahead))
            if ahead < -1.0:
                start -= ahead  # it was delayed: continue at `rate`, not faster


if __name__ == "__main__":
    run_client(
        sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), sys.argv[6] == "1"
    )
