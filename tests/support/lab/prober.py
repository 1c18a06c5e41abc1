"""A process that stands in one place of the lab: it serves, and it dials, on command.

Commands come as JSON lines on stdin, answers go as JSON lines to stdout; one at a time. It
imports nothing of kbpf. A server answers each line (TCP) or datagram (UDP) with its own name and
the client's address as it saw it, so that a test knows what each side saw.
"""

import contextlib
import ctypes
import hashlib
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
"""Seconds for an answer: nothing here takes one, but who should answer may not get a turn."""
SIZE = struct.Struct("!Q")
CHUNK = 1 << 16
STATES = (  # by their number in the kernel, include/net/tcp_states.h
    "-", "ESTAB", "SYN-SENT", "SYN-RECV", "FIN-WAIT-1", "FIN-WAIT-2", "TIME-WAIT", "UNCONN",
    "CLOSE-WAIT", "LAST-ACK", "LISTEN", "CLOSING", "NEW-SYN-RECV",
)  # fmt: skip
_RETRANSMITTED = 100  # offset of tcpi_total_retrans in struct tcp_info
_RTO_TIME = 244
LIBC = ctypes.CDLL(None, use_errno=True)
FAMILIES = {"4": socket.AF_INET, "6": socket.AF_INET6, "mapped": socket.AF_INET6}


def errno_name(error):
    import errno

    if isinstance(error, TimeoutError) and error.errno is None:
        return "timeout"
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


def begin(s, to):
    """Begins to connect. Whether it takes the network; else it is done, or an OSError."""
    s.setblocking(False)
    try:
        s.connect(to)
    except BlockingIOError:
        return True
    return False


def finish(s, timeout):
    """Ends what begin() began, an OSError if not well; the socket has this timeout from now on."""
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
    """How many segments of this connection were sent again."""
    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RETRANSMITTED + 4)
    return struct.unpack_from("=I", info, _RETRANSMITTED)[0]


def timer_seconds(s):
    """How long this end has waited for lost segments, by the retransmission timer; 0 from a kernel
    that does not say it (before v6.7).
    """
    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTO_TIME + 4)
    return struct.unpack_from("=I", info, _RTO_TIME)[0] / 1000 if len(info) > _RTO_TIME else 0.0


def filled(s, data):
    """The buffer, full; OSError when the other side ends before it is."""
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
        self.timer_seconds = 0.0

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
        while True:
            connection, client = listener.accept()
            threading.Thread(target=self._talk, args=(connection, client)).start()

    def _talk(self, connection, client):
        with connection:
            try:
                port = connection.getsockname()[1]
                while line := connection.recv(65536):
                    if line.endswith(b"bye\n"):
                        connection.sendall(self._answer(client, port))
                        return
                    connection.sendall(self._answer(client, port))
            except OSError:
                return

    def bulk(self, *ports):
        """Serves bulk(): a size, so many bytes, and the way back. Size 0: an echo without end."""
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
                if not size:
                    while piece := connection.recv(CHUNK):
                        connection.sendall(piece)
                    self.timer_seconds = max(self.timer_seconds, timer_seconds(connection))
                    return
                data = filled(connection, bytearray(size))
                connection.sendall(hashlib.sha256(data).digest())
                connection.sendall(data)
                connection.sendall(SIZE.pack(retransmitted(connection)))
            except OSError:
                return

    def seen(self):
        """Datagrams by port, and the longest wait of an echo for lost segments since asked last."""
        waited, self.timer_seconds = self.timer_seconds, 0.0
        return {"udp": dict(self.udp_seen), "timer_seconds": waited}

    def _udp(self, s):
        port = s.getsockname()[1]
        while True:
            _, client = s.recvfrom(65536)
            self.udp_seen[port] += 1
            s.sendto(self._answer(client, port), client)


class Client:
    """Dials, once or many times, and keeps sockets that a test asks it to keep."""

    def __init__(self):
        self.kept = {}
        self.load = None
        self.streams = {}

    def _socket(self, family, kind, bind=None):
        s = socket.socket(FAMILIES[family], kind)
        if bind:
            s.bind((bind, 0))
        return s

    def tcp(self, host, port, family="4", timeout=PATIENCE, keep=None, bind=None):
        """Connects, and hears who answers. An error is `at_once` when the call itself gave it:
        nobody on the network was asked.
        """
        s = self._socket(family, socket.SOCK_STREAM, bind)
        asked = False
        try:
            asked = begin(s, (host, port))
            finish(s, timeout)
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
        """Begins to connect, and goes on with other things."""
        s = self._socket(family, socket.SOCK_STREAM)
        self.kept[keep] = s
        begin(s, (host, port))
        return {}

    def go_on(self, keep, timeout=PATIENCE):
        """What becomes of what was begun: who answers, or an error."""
        try:
            finish(self.kept[keep], timeout)
        except OSError as error:
            return {"error": errno_name(error)}
        return self.talk(keep, timeout)

    def talk(self, keep, timeout=PATIENCE):
        """One more line over a kept connection, or one more datagram on a kept UDP socket."""
        s = self.kept[keep]
        s.settimeout(timeout)
        try:
            s.send(b"hello\n")
            return json.loads(s.recv(4096))
        except OSError as error:
            return {"error": errno_name(error)}

    def hear(self, keep, timeout=PATIENCE):
        """What a kept socket gets without asking: as a rule an error, or "timeout"."""
        s = self.kept[keep]
        s.settimeout(timeout)
        try:
            return {"heard": len(s.recv(4096))}
        except OSError as error:
            return {"error": errno_name(error)}

    def dissolve(self, keep):
        """A kept UDP socket is connected to nobody any more."""
        unspecified = bytes(16)
        if LIBC.connect(self.kept[keep].fileno(), unspecified, len(unspecified)):
            raise OSError(ctypes.get_errno(), "connect to AF_UNSPEC")
        return {}

    def udp(self, host, port, family="4", timeout=PATIENCE, keep=None, connected=False):
        """A datagram and its answer, or an error, see tcp(). `keep`: on a socket that stays, made
        when it is new.
        """
        asked = False
        s = self.kept.get(keep) or self._socket(family, socket.SOCK_DGRAM)
        s.settimeout(timeout)
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

    def bulk(self, host, port, size, family="4", timeout=30.0):
        """So many bytes to a Server.bulk() and back. What each side got must be what was sent:
        `there` and `back`; `retransmitted` by both; `seconds` for each way.
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

    def datagrams(self, host, port, sockets, each, family="4", timeout=PATIENCE):
        """So many sockets, connected, with so many datagrams each, in turns: who answered how
        often. An answer more than were asked for is an error.
        """
        names, errors = Counter(), Counter()
        with contextlib.ExitStack() as stack:
            opened = []
            for _ in range(sockets):
                s = stack.enter_context(self._socket(family, socket.SOCK_DGRAM))
                s.settimeout(timeout)
                s.connect((host, port))
                opened.append(s)
            for _ in range(each):
                for s in opened:
                    try:
                        s.send(b"hello")
                        names[json.loads(s.recv(4096))["name"]] += 1
                    except OSError as error:
                        errors[errno_name(error)] += 1
            for s in opened:
                s.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    errors[f"one more: {s.recv(4096)}"] += 1
        return {"names": names, "errors": errors}

    def start_stream(self, keep, host, port, family="4", timeout=10.0):
        """From now on bytes to a Server.bulk() and back, both at once."""
        s = self._socket(family, socket.SOCK_STREAM)
        s.settimeout(timeout)
        s.connect((host, port))
        s.sendall(SIZE.pack(0))
        self.streams[keep] = Stream(s)
        return {}

    def peek_stream(self, keep):
        return self.streams[keep].result()

    def stop_stream(self, keep):
        return self.streams.pop(keep).stop()

    def drop(self, keep):
        self.kept.pop(keep).close()
        return {}

    def many(
        self, count, host, port, family="4", timeout=PATIENCE, protocol="tcp", connected=False
    ):
        """So many fresh dials, one after the other: who answered, how often, and errors, of which
        so many came `at_once`.

        `seen` has each different answer once: its server's name and port, the client's address
        that the server saw, and the address and port that the client believes to talk to.
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

    def start_load(
        self, host, port, family="4", timeout=PATIENCE, pause=0.0, threads=1, protocol="tcp"
    ):
        """Dials without end from now on, in the background."""
        one = self.tcp if protocol == "tcp" else self.udp
        self.load = Load(one, threads, pause, (host, port, family, timeout))
        return {}

    def stop_load(self):
        load, self.load = self.load, None
        return load.stop()

    def peek_load(self):
        return self.load.result()


class Stream:
    """Sends without end over a connected socket, and compares what comes back."""

    def __init__(self, s):
        self.socket = s
        self.block = os.urandom(CHUNK - 1)  # an odd period: what is shifted is not the same
        self.ended = threading.Event()
        self.sent = self.got = 0
        self.error = ""
        self.longest = 0.0
        self.threads = [threading.Thread(target=each) for each in (self._send, self._receive)]
        for thread in self.threads:
            thread.start()

    def _send(self):
        try:
            while not self.ended.is_set():
                self.socket.sendall(self.block)
                self.sent += len(self.block)
                time.sleep(0.002)  # the test is about what is lost, not about a busy machine
            self.socket.shutdown(socket.SHUT_WR)
        except OSError as error:
            self.error = self.error or errno_name(error)

    def _receive(self):
        last = time.monotonic()
        twice = self.block * 2
        try:
            while piece := self.socket.recv(CHUNK // 2):
                now = time.monotonic()
                self.longest, last = max(self.longest, now - last), now
                at = self.got % len(self.block)
                if piece != twice[at : at + len(piece)]:
                    self.error = self.error or f"other bytes after {self.got}"
                self.got += len(piece)
        except OSError as error:
            self.error = self.error or errno_name(error)

    def result(self):
        return {
            "got": self.got,
            "error": self.error,
            "longest": round(self.longest, 3),
            "retransmitted": retransmitted(self.socket),
            "timer_seconds": timer_seconds(self.socket),
        }

    def stop(self):
        self.ended.set()
        for thread in self.threads:
            thread.join()
        complete = self.got == self.sent
        with self.socket:
            return {**self.result(), "complete": complete}


class Load:
    def __init__(self, dial, threads, pause, arguments):
        self.ended = threading.Event()
        self.names, self.errors = Counter(), []
        self.started = time.monotonic()
        self.lock = threading.Lock()
        self.threads = [
            threading.Thread(target=self._run, args=(dial, pause, arguments))
            for _ in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, dial, pause, arguments):
        while not self.ended.is_set():
            answer = dial(*arguments)
            with self.lock:
                if "error" in answer:
                    at = time.monotonic() - self.started
                    self.errors.append([answer["error"], round(at, 3), answer.get("from")])
                else:
                    self.names[answer["name"]] += 1
            if pause:
                time.sleep(pause)

    def result(self):
        with self.lock:
            return {"names": dict(self.names), "errors": list(self.errors)}

    def stop(self):
        self.ended.set()
        for thread in self.threads:
            thread.join()
        return self.result()


def main():
    server, client = Server(), Client()
    handlers = {"serve": server.serve, "seen": server.seen}
    handlers["serve_bulk"] = lambda ports: server.bulk(*ports)
    for name in (
        "tcp", "udp", "begin", "go_on", "talk", "hear", "dissolve", "drop", "many", "start_load",
        "stop_load", "peek_load", "bulk", "datagrams", "start_stream", "peek_stream", "stop_stream",
    ):  # fmt: skip
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
