# SPDX-License-Identifier: Apache-2.0
"""A fake of a mesh's proxy: `mesh_proxy.py PORT MARK` accepts redirected connections, and connects
to where each of them was going. MARK is that of its packets, 0 for none.

It passes the first line of the backend on, and adds what it knows: the address that its client
dialled (SO_ORIGINAL_DST), as Envoy, ztunnel and Linkerd's proxy read it.
"""

import json
import socket
import struct
import sys

SO_ORIGINAL_DST = 80  # of SOL_IP, and of SOL_IPV6 (IP6T_SO_ORIGINAL_DST)
TIMEOUT_S = 30.0


def original_destination(client: socket.socket) -> tuple[str, int]:
    """struct sockaddr_in6: family, port, flow information, address, scope; sockaddr_in: the first
    two and the address.
    """
    if "." not in client.getpeername()[0]:
        raw = client.getsockopt(socket.IPPROTO_IPV6, SO_ORIGINAL_DST, 28)
        port, address = struct.unpack("!2xH4x16s4x", raw)
        return socket.inet_ntop(socket.AF_INET6, address), port
    raw = client.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
    port, address = struct.unpack("!2xH4s8x", raw)
    return socket.inet_ntoa(address), port


def answer(client: socket.socket, mark: int) -> None:
    original = original_destination(client)
    reply = {"original": original}
    try:
        family = socket.AF_INET6 if ":" in original[0] else socket.AF_INET
        with socket.socket(family) as backend:
            backend.settimeout(TIMEOUT_S)
            if mark:
                backend.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
            backend.connect(original)
            backend.sendall(client.recv(4096))
            reply |= json.loads(backend.recv(4096))
    except OSError as error:
        reply["proxy_error"] = str(error)
    client.sendall(json.dumps(reply).encode() + b"\n")


def main() -> None:
    port, mark = map(int, sys.argv[1:])
    with socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        print("serves", flush=True)
        while True:
            client, _ = server.accept()
            with client:
                client.settimeout(TIMEOUT_S)
                answer(client, mark)


main()
