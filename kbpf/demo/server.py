# SPDX-License-Identifier: Apache-2.0
"""A backend of the demo: `python -m kbpf.demo.server NAME TCP-PORT UDP-PORT`.

Answers every HTTP request and every datagram with its name. Prints `ready` when it listens. Imports
little, because several of these run at once.
"""

import socket
import sys
import threading


def _serve_http(listener: socket.socket, name: str) -> None:
    body = f"{name}\n".encode()
    response = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(15.0)
            try:
                connection.recv(4096)
                connection.sendall(response % (len(body), body))
            except OSError:
                continue  # this client has gone; serve the next one


def _serve_datagrams(sock: socket.socket, name: str) -> None:
    while True:
        _, client = sock.recvfrom(4096)
        sock.sendto(name.encode(), client)


def serve(name: str, tcp_port: int, udp_port: int) -> None:
    """Serves without end."""
    listener = socket.create_server(("", tcp_port), backlog=1024)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("", udp_port))
    threading.Thread(target=_serve_datagrams, args=(datagrams, name), daemon=True).start()
    print("ready", flush=True)
    _serve_http(listener, name)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
