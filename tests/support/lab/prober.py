# SPDX-License-Identifier: Apache-2.0
"""A process in one place of the lab that serves and dials on command.

Commands are JSON lines on stdin, answers JSON lines on stdout, one at a time. It imports nothing of
kbpf. A server answers each line (TCP) or datagram (UDP) with its name and the client's address as
it sees it, so that a test knows what each side sees.
"""

import ctypes
import errno
import hashlib
import itertools
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter

PATIENCE = 30.0
"""Seconds to wait for an answer. It usually takes moments, but the other process may not be
scheduled for a while.
"""
CONNECTED_PATIENCE = 240.0
"""The same once a TCP connection is established. Lost segments are sent again, so only the other
process can be late; on an emulated machine it once took longer than PATIENCE.
"""
SIZE = struct.Struct("!Q")
STATES = (  # by their number in the kernel, include/net/tcp_states.h
    "-",
    "ESTAB",
    "SYN-SENT",
    "SYN-RECV",
    "FIN-WAIT-1",
    "FIN-WAIT-2",
    "TIME-WAIT",
    "UNCONN",
    "CLOSE-WAIT",
    "LAST-ACK",
    "LISTEN",
    "CLOSING",
    "NEW-SYN-RECV",
)
_RETRANSMITTED = 100  # offset of tcpi_total_retrans in struct tcp_info
LIBC = ctypes.CDLL(None, use_errno=True)
FAMILIES = {"4": socket.AF_INET, "6": socket.AF_INET6, "mapped": socket.AF_INET6}


def errno_name(error):
    if isinstance(error, TimeoutError) and error.errno is None:
        return "timeout"
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


def begin(s, to):
    """Starts a connect(). Returns whether it is in progress; else it is established. OSError if the
    call itself fails.
    """
    s.setblocking(False)
    try:
        s.connect(to)
    except BlockingIOError:
        return True
    return False


def finish(s, timeout):
    """Waits for the connect() of begin(); OSError if it fails. The socket keeps this time-out."""
    s.settimeout(timeout)
    ready = select.poll()
    ready.register(s, select.POLLOUT)
    if not ready.poll(timeout * 1000):
        raise TimeoutError
    if code := s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(code, os.strerror(code))


def state(s):
    """The state of a TCP socket, as ss(8) writes it."""
    return STATES[s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]]


def retransmitted(s):
    """How many segments of this connection were retransmitted."""
    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RETRANSMITTED + 4)
    return struct.unpack_from("=I", info, _RETRANSMITTED)[0]


def filled(s, data):
    """Receives until the buffer is full and returns it; OSError if the peer closes before."""
    view = memoryview(data)
    while view:
        got = s.recv_into(view, min(len(view), 1 << 20))
        if not got:
            raise ConnectionResetError(104, f"{len(view)} bytes are missing")
        view = view[got:]
    return data


class Server:
    """Serves TCP and UDP ports until the process ends."""

    def __init__(self):
        self.name = ""
        self.udp_seen = Counter()

    def serve(self, name, tcp=(), udp=(), address="::"):
        self.name = name
        for port in tcp:
            threading.Thread(target=self._tcp, args=(self._bind(address, port, True),)).start()
        for port in udp:
            threading.Thread(target=self._udp, args=(self._bind(address, port, False),)).start()
        return {}

    def _bind(self, address, port, tcp):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        s = socket.socket(family, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address == "::":
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        s.bind((address, port))
        if tcp:
            s.listen(4096)
        return s

    def _answer(self, client, port):
        address = client[0].removeprefix("::ffff:")
        return json.dumps({"name": self.name, "client": address, "port": port}).encode() + b"\n"

    def _tcp(self, listener):
        """Serves one port. One thread for all connections: a thread for each costs more than all
        else that a connection does, and loads make hundreds a second.
        """
        connections = {}
        ready = select.epoll()
        ready.register(listener, select.EPOLLIN)
        while True:
            for fd, _ in ready.poll():
                if fd == listener.fileno():
                    connection, client = listener.accept()
                    connections[connection.fileno()] = connection, client
                    ready.register(connection, select.EPOLLIN)
                elif not self._talk(*connections[fd]):
                    connections.pop(fd)[0].close()

    def _talk(self, connection, client):
        """Answers one line. Returns whether more may follow."""
        try:
            line = connection.recv(65536)
            if line:
                connection.sendall(self._answer(client, connection.getsockname()[1]))
        except OSError:
            return False
        return bool(line) and not line.endswith(b"bye\n")

    def bulk(self, *ports):
        """Serves Client.bulk(): receives a size and that many bytes, and sends them back."""
        for port in ports:
            listener = self._bind("::", port, True)
            threading.Thread(target=self._bulk, args=(listener,)).start()
        return {}

    def _bulk(self, listener):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._exchange, args=(connection,)).start()

    def _exchange(self, connection):
        with connection:
            try:
                (size,) = SIZE.unpack(filled(connection, bytearray(SIZE.size)))
                data = filled(connection, bytearray(size))
                connection.sendall(hashlib.sha256(data).digest())
                connection.sendall(data)
                connection.sendall(SIZE.pack(retransmitted(connection)))
            except OSError:
                return

    def seen(self):
        """Datagrams by port."""
        return {"udp": dict(self.udp_seen)}

    def _udp(self, s):
        port = s.getsockname()[1]
        while True:
            _, client = s.recvfrom(65536)
            self.udp_seen[port] += 1
            s.sendto(self._answer(client, port), client)


class Client:
    """Dials once or many times, and keeps named sockets open."""

    def __init__(self, udp_ports):
        """`udp_ports`: (first, last) for clients by UDP; else the kernel chooses their ports."""
        self.udp_ports = udp_ports and itertools.cycle(range(udp_ports[0], udp_ports[1] + 1))
        self.kept = {}
        self.load = None

    def _socket(self, family, kind, bind=None):
        s = socket.socket(FAMILIES[family], kind)
        if bind:
            s.bind((bind, 0))
        elif kind == socket.SOCK_DGRAM and self.udp_ports:
            self._bind_udp(s)
        return s

    def _bind_udp(self, s):
        while True:
            try:
                s.bind(("", next(self.udp_ports)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return

    def tcp(self, host, port, family="4", timeout=None, keep=None, bind=None):
        """Connects and reads the server's answer. An error is `at_once` if connect() itself
        returned it, without a packet on the network. `timeout`: of each step, instead of PATIENCE
        and CONNECTED_PATIENCE.
        """
        s = self._socket(family, socket.SOCK_STREAM, bind)
        asked = False
        try:
            asked = begin(s, (host, port))
            finish(s, timeout or PATIENCE)
            s.settimeout(timeout or CONNECTED_PATIENCE)
            s.sendall(b"hello\n" if keep else b"bye\n")
            answer = json.loads(s.recv(4096))
            answer["peer"] = list(s.getpeername()[:2])
        except OSError as error:
            own, ends = s.getsockname()[1], {"state": state(s), "sent again": retransmitted(s)}
            s.close()
            return {"error": errno_name(error), "at_once": not asked, "from": own, **ends}
        if keep:
            self.kept[keep] = s
        else:
            s.close()
        return answer

    def begin(self, host, port, keep, family="4"):
        """Starts a connect() and returns without waiting for it."""
        s = self._socket(family, socket.SOCK_STREAM)
        self.kept[keep] = s
        begin(s, (host, port))
        return {}

    def go_on(self, keep, timeout=PATIENCE):
        """Waits for the connect() of begin(): the server's answer, or an error."""
        try:
            finish(self.kept[keep], timeout)
        except OSError as error:
            return {"error": errno_name(error)}
        return self.talk(keep, timeout)

    def talk(self, keep, timeout=PATIENCE):
        """Sends another line on a kept connection, or another datagram on a kept UDP socket."""
        s = self.kept[keep]
        s.settimeout(timeout)
        try:
            s.send(b"hello\n")
            return json.loads(s.recv(4096))
        except OSError as error:
            return {"error": errno_name(error)}

    def hear(self, keep, timeout=PATIENCE):
        """What a kept socket receives without sending: usually an error, or "timeout"."""
        s = self.kept[keep]
        s.settimeout(timeout)
        try:
            return {"heard": len(s.recv(4096))}
        except OSError as error:
            return {"error": errno_name(error)}

    def dissolve(self, keep):
        """Disconnects a kept UDP socket: connect() to AF_UNSPEC."""
        unspecified = bytes(16)
        if LIBC.connect(self.kept[keep].fileno(), unspecified, len(unspecified)):
            raise OSError(ctypes.get_errno(), "connect to AF_UNSPEC")
        return {}

    def udp(self, host, port, family="4", timeout=None, keep=None, connected=False):
        """Sends a datagram; returns its answer or an error like tcp(). `keep`: the name of a socket
        that stays open; it is created on first use.
        """
        asked = False
        s = self.kept.get(keep) or self._socket(family, socket.SOCK_DGRAM)
        s.settimeout(timeout or PATIENCE)
        try:
            if connected:
                s.connect((host, port))
                s.send(b"hello\n")
            else:
                s.sendto(b"hello\n", (host, port))
            asked = True
            data, sender = s.recvfrom(4096)
            answer = json.loads(data)
            answer["peer"] = list(sender[:2])
            if connected:
                answer["getpeername"] = list(s.getpeername()[:2])
        except OSError as error:
            if not keep:
                s.close()
            return {"error": errno_name(error), "at_once": not asked}
        if keep:
            self.kept[keep] = s
        else:
            s.close()
        return answer

    def bulk(self, host, port, size, family="4", timeout=240.0):
        """Sends `size` bytes to a Server.bulk() and back. Returns `there` and `back`, whether each
        side received what was sent; `retransmitted`, segments of both; `seconds` for each
        direction. `timeout`: of all of sendall().
        """
        s = self._socket(family, socket.SOCK_STREAM)
        s.settimeout(timeout)
        data = os.urandom(size)
        digest = hashlib.sha256(data).digest()
        with s:
            try:
                began = time.monotonic()
                s.connect((host, port))
                s.sendall(SIZE.pack(size))
                s.sendall(data)
                there = filled(s, bytearray(len(digest)))
                turned = time.monotonic()
                back = filled(s, bytearray(size))
                seconds = [turned - began, time.monotonic() - turned]
                (theirs,) = SIZE.unpack(filled(s, bytearray(SIZE.size)))
            except OSError as error:
                return {"error": errno_name(error)}
            return {
                "there": there == digest,
                "back": hashlib.sha256(back).digest() == digest,
                "retransmitted": [retransmitted(s), theirs],
                "seconds": [round(each, 2) for each in seconds],
            }

    def drop(self, keep):
        self.kept.pop(keep).close()
        return {}

    def many(self, count, host, port, family="4", timeout=None, protocol="tcp", connected=False):
        """Dials `count` times, one after the other: how often each server answered, the errors, and
        how many of these came `at_once`.

        `seen` has each distinct answer once: the server's name and port, the client's address as
        the server sees it, and the peer's address and port as the client sees them.
        """
        names, errors, seen, at_once = Counter(), Counter(), set(), 0
        for _ in range(count):
            if protocol == "tcp":
                answer = self.tcp(host, port, family, timeout)
            else:
                answer = self.udp(host, port, family, timeout, connected=connected)
            if "error" in answer:
                errors[answer["error"]] += 1
                at_once += answer["at_once"]
            else:
                names[answer["name"]] += 1
                peer = answer.get("getpeername", answer["peer"])
                for pair in (peer, answer["peer"]):
                    seen.add((answer["name"], answer["port"], answer["client"], *pair))
        return {"names": names, "errors": errors, "seen": sorted(seen), "at_once": at_once}

    def start_load(self, host, port, family="4", timeout=None, pause=0.0, threads=1, protocol="tcp", record=False):
        one = self.tcp if protocol == "tcp" else self.udp
        self.load = Load(one, threads, pause, (host, port, family, timeout), record)
        return {}

    def stop_load(self):
        load, self.load = self.load, None
        return load.stop()

    def peek_load(self):
        return self.load.result()


class Load:
    """Dials all the time. `record`: its result has the beginning and the end (ns, CLOCK_MONOTONIC) of
    each dial, and the server's name and port.
    """

    def __init__(self, dial, threads, pause, arguments, record):
        self.ended = threading.Event()
        self.names, self.errors, self.record, self.recorded = Counter(), [], record, []
        self.started = time.monotonic()
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self._run, args=(dial, pause, arguments)) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def _run(self, dial, pause, arguments):
        while not self.ended.is_set():
            began = time.monotonic_ns()
            answer = dial(*arguments)
            with self.lock:
                if "error" in answer:
                    at = time.monotonic() - self.started
                    self.errors.append([answer["error"], round(at, 3), answer.get("from")])
                else:
                    self.names[answer["name"]] += 1
                    if self.record:
                        self.recorded.append([began, time.monotonic_ns(), answer["name"], answer["port"]])
            if pause:
                time.sleep(pause)

    def result(self):
        with self.lock:
            return {"names": dict(self.names), "errors": list(self.errors)}

    def stop(self):
        self.ended.set()
        for thread in self.threads:
            thread.join()
        return self.result() | {"recorded": self.recorded}


NAMES = """
tcp udp begin go_on talk hear dissolve drop many start_load stop_load peek_load bulk
"""
"""The methods of Client that may be called."""


def main():
    server, client = Server(), Client([int(port) for port in sys.argv[1:]])
    handlers = {"serve": server.serve, "seen": server.seen}
    handlers["serve_bulk"] = lambda ports: server.bulk(*ports)
    for name in NAMES.split():
        handlers[name] = getattr(client, name)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = handlers[command.pop("do")](**command)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
