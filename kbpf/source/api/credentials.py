# SPDX-License-Identifier: Apache-2.0
"""One API server and the credentials for it. The only module that uses the `kubernetes` library.

- Plain credentials (token, token file, client certificate, basic, the service account of a pod)
  are read here. A token file is read for every request, of which there are few: one per watch every
  5 to 10 minutes.
- Exec plugins and auth providers run the library in a child process: importing it costs 30 MB. The
  result is kept until it expires or the API server responds 401. After a failure, or a second 401
  in a row, all watches wait together before it runs again (PluginCredentials).
- Certificate files are checked before each new connection; if one has changed, a new TLS context
  is made. If it cannot be read, the old context stays in use.
"""

import base64
import json
import logging
import os
import random
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kbpf.errors import ConfigError, SourceError
from kbpf.kernel.system import children
from kbpf.kernel.system.polling import Backoff, read_stamp
from kbpf.model.address import Addr
from kbpf.source.api.kubeconfig import Access
from kbpf.source.api.outages import OutageLog

log = logging.getLogger("kbpf.source")

PLUGIN_TIMEOUT: Final = 60.0
MAX_PLUGIN_BYTES: Final = 1 << 20
"""Of standard output and error of a plugin: tokens and certificates have a few kB."""
PLUGIN_PRINTED: Final = "the plugin printed"
EXPIRY_SKEW: Final = 60.0
MAX_PAGES_BYTES: Final = 192 << 20
"""Shared by all pages of lists that are in memory at the same time."""
REWIND_WINDOW: Final = 300.0
"""Watches that report a rewind within this time of each other report the same restore."""


class Credentials(NamedTuple):
    """The credentials of a request: the Authorization header, and the certificate of a plugin
    (PEM).
    """

    authorization: str = ""
    cert: bytes = b""
    key: bytes = b""
    expires_at: float = float("inf")


ConnectHandler = Callable[[int, Addr, int], None]
"""(socket cookie, address, port): a connection to the API server is about to be opened."""

RequestHandler = Callable[[str, str, str, float], None]
"""(host, method, status or "<error>", seconds): a request has completed or failed."""


class Cluster:
    """An API server. Thread-safe. `on_request` is called for each request, and `on_connect` before
    each connection is opened, by any thread. `problems` has a line for each security problem of
    the connection, unless `allow_insecure`.
    """

    def __init__(
        self, access: Access, on_request: RequestHandler = lambda *_: None, allow_insecure: bool = False
    ) -> None:
        self.access = access
        self.problems = () if allow_insecure else tuple(_insecure_access_problems(access))
        self.on_request = on_request
        self.on_connect: ConnectHandler = lambda *_: None
        self._lock = threading.Lock()
        self._servers = (access.server, *access.other_servers)
        self._server_index = 0
        self.page_memory = PageMemory()
        self.outages = OutageLog()
        self._plugin_credentials = PluginCredentials()
        self._last_rewind = float("-inf")
        self._tls: ssl.SSLContext | None = None
        self._tls_stamp: object = None

    @property
    def url(self) -> str:
        """The server to connect to next."""
        return self._servers[self._server_index % len(self._servers)]

    def mark_unreachable(self, url: str) -> None:
        """Records that connecting to `url` failed: the next connection goes to the next server, if
        any.
        """
        with self._lock:
            if url == self.url:
                self._server_index += 1

    def get_credentials(self, is_cancelled: Callable[[], bool] = lambda: False) -> Credentials:
        """Returns fresh credentials for one request. Raises SourceError.

        `is_cancelled` is polled while a plugin runs; if it returns True, the plugin is killed.
        """
        access = self.access
        if access.plugin:
            return self._plugin_credentials.get(access.plugin, is_cancelled)
        if access.token_file:
            return Credentials(_bearer_header(_read_token(access.token_file), access.token_file))
        if access.token:
            return Credentials(_bearer_header(access.token, access.where))
        return Credentials(f"Basic {access.basic}" if access.basic else "")

    def reject_credentials(self, credentials: Credentials) -> None:
        """Records that the API server responded 401: a plugin has to run again."""
        self._plugin_credentials.reject(credentials)

    def report_rewind(self, name: str, old_version: str, new_version: str) -> None:
        """The server's version has decreased. Logs one warning for all of its watches."""
        with self._lock:
            is_repeat = time.monotonic() - self._last_rewind < REWIND_WINDOW
            self._last_rewind = time.monotonic()
        if not is_repeat:
            log.warning(
                "the API server's version went back from %r to %r (first seen by watch %s): it was "
                "restored, or another server answers at %s; listing everything again",
                old_version,
                new_version,
                name,
                self.url,
            )

    def get_tls_context(self, credentials: Credentials) -> ssl.SSLContext | None:
        """Returns the TLS context for the certificates now on disk; None for http://."""
        access = self.access
        if not self.url.startswith("https:"):
            return None
        stamp = (credentials.cert, *map(read_stamp, (access.ca_file, access.cert_file, access.key_file)))
        with self._lock:
            if self._tls is None or stamp != self._tls_stamp:
                try:
                    self._tls, self._tls_stamp = _make_tls_context(access, credentials), stamp
                except SourceError as error:
                    if self._tls is None:
                        raise
                    log.warning("cannot use the new certificates, keeping the old ones error=%r", str(error))
            return self._tls


class PageMemory:
    """Limits the memory for pages of lists, for all watches of a server together: four lists at
    once must not take four times the memory of one.
    """

    def __init__(self, size: int = MAX_PAGES_BYTES) -> None:
        self._lock = threading.Lock()
        self._size = self._available = size

    @contextmanager
    def lease(self) -> Iterator[Callable[[int], None]]:
        """Yields a function that reserves bytes, or raises SourceError. The end of the block
        releases them.
        """
        reserved = 0

        def reserve(size: int) -> None:
            nonlocal reserved
            with self._lock:
                if size > self._available:
                    what = f"pages of lists exceed {self._size >> 20} MiB together"
                    raise SourceError(what)
                self._available -= size
                reserved += size

        try:
            yield reserve
        finally:
            with self._lock:
                self._available += reserved


class PluginCredentials:
    """The last result of an exec plugin or auth provider, and when it may run again: one backoff
    for all watches, which fail together.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, rng: Callable[[], float] = random.random) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._backoff = Backoff(1.0, 60.0, rng, steady_after=5.0)
        self._credentials: Credentials | None = None
        self._issued_at: float | None = None  # time of the last success, None after a failure
        self._retry_at = 0.0
        self._error: SourceError | None = None

    def get(self, kubeconfig: Path, is_cancelled: Callable[[], bool]) -> Credentials:
        """Returns the credentials; runs the plugin if there are none or they expire. Raises
        SourceError.
        """
        # Held while a plugin runs, which may take a minute: stop() must not wait for it.
        while not self._lock.acquire(timeout=0.1):
            if is_cancelled():
                raise SourceError("stopped", str(kubeconfig))
        try:
            credentials = self._credentials
            if credentials is None or time.time() > credentials.expires_at - EXPIRY_SKEW:
                credentials = self._credentials = self._fetch(kubeconfig, is_cancelled)
            return credentials
        finally:
            self._lock.release()

    def reject(self, credentials: Credentials) -> None:
        """Records that these are not valid. The first time, the plugin may run again at once."""
        # By identity: of several watches with the same credentials only the first one counts.
        if self._credentials is credentials:
            self._credentials, self._error = None, None
            self._schedule_retry(failed=False)

    def _fetch(self, kubeconfig: Path, is_cancelled: Callable[[], bool]) -> Credentials:
        if self._clock() < self._retry_at:
            what = "no credentials: the API server rejected the last ones"
            error = self._error or SourceError(what, str(kubeconfig), "the plugin will run again")
            raise SourceError(error.what, error.where, error.hint)
        try:
            credentials = _run_plugin(kubeconfig, is_cancelled)
        except SourceError as error:
            if not is_cancelled():
                self._error = error
                self._schedule_retry(failed=True)
            raise
        self._issued_at = self._clock()
        return credentials

    def _schedule_retry(self, *, failed: bool) -> None:
        now = self._clock()
        lifetime = 0.0 if self._issued_at is None else now - self._issued_at
        self._retry_at, self._issued_at = (now + self._backoff.next_delay(failed=failed, healthy_for=lifetime), None)


def _insecure_access_problems(access: Access) -> Iterator[str]:
    if access.insecure and access.server.startswith("https:"):
        yield str(
            ConfigError(
                "the API server's certificate is not verified: any machine on the path to it can "
                "read the credentials and control what this node serves",
                f"insecure-skip-tls-verify in {access.where}",
                "set certificate-authority, or allow it with --allow-insecure-api",
            )
        )


def default_node_name() -> str:
    """Returns this machine's name as kube-proxy uses it: the hostname in lower case."""
    name = socket.gethostname().strip().lower()
    if not name:
        hint = "give --hostname-override NAME"
        raise ConfigError("this machine has no hostname", "gethostname", hint)
    return name


def _read_token(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise SourceError(f"cannot read the token file: {reason}", path) from error


def _bearer_header(token: str, where: str) -> str:
    if not token or not token.isascii() or not token.isprintable():
        raise SourceError("the token is empty or contains invalid characters", where)
    return f"Bearer {token}"


def _make_tls_context(access: Access, credentials: Credentials) -> ssl.SSLContext:
    field, where = "certificate-authority", access.ca_file or access.where
    try:
        ca_text = access.ca_data.decode() or None
        context = ssl.create_default_context(cafile=None if ca_text else access.ca_file or None, cadata=ca_text)
        # Python 3.13 rejects CAs without an Authority Key Identifier; kubeadm's CAs have none.
        context.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", 0)
        context.set_alpn_protocols(["http/1.1"])
        if access.insecure:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        cert, key = credentials.cert or access.cert_data, credentials.key or access.key_data
        if cert or access.cert_file:
            field, where = "client-certificate or client-key", access.cert_file or access.where
            with _as_file(cert, access.cert_file) as cert_path, _as_file(key, access.key_file) as key_path:
                context.load_cert_chain(cert_path, key_path or None, password=lambda: "")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise SourceError(f"cannot use {field}: {reason}", where, "check the file") from error
    return context


@contextmanager
def _as_file(data: bytes, path: str) -> Iterator[str]:
    """Yields a path from which OpenSSL can read `data`: it loads certificates only from files."""
    if not data:
        yield path
        return
    fd = os.memfd_create("kbpf-certificate")
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _run_plugin(kubeconfig: Path, is_cancelled: Callable[[], bool]) -> Credentials:
    """Runs the kubernetes library for this kubeconfig's user in a child process."""
    import subprocess

    command = children.python_command("kbpf.source.api.credentials", str(kubeconfig.absolute()))
    deadline, where = time.monotonic() + PLUGIN_TIMEOUT, str(kubeconfig)

    def check() -> None:
        if is_cancelled():
            raise SourceError("no credentials: stopped", where)
        if time.monotonic() > deadline:
            reason = f"the plugin took more than {PLUGIN_TIMEOUT:.0f} s"
            raise SourceError(f"no credentials: {reason}", where)

    with subprocess.Popen(
        command,
        cwd=children.WORKING_DIRECTORY,
        env=children.child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        try:
            out, err = children.read_bounded(child, 4 * MAX_PLUGIN_BYTES, check)
        except (SourceError, ValueError) as error:
            # The plugin is a grandchild in the same session: it must not survive.
            os.killpg(child.pid, signal.SIGKILL)
            if isinstance(error, SourceError):
                raise
            raise SourceError(f"no credentials: {PLUGIN_PRINTED} {error}", where) from None
    lines = err.decode(errors="replace").strip().splitlines() or ["no reason given"]
    if child.returncode != 0:
        hint = "run the kubeconfig's exec command by hand"
        reason = lines[-1].removeprefix("ERROR:root:")  # the prefix of the library's log lines
        raise SourceError(f"no credentials: {reason}", where, hint)
    answer = json.loads(out)
    return Credentials(
        answer["authorization"],
        base64.b64decode(answer["cert"]),
        base64.b64decode(answer["key"]),
        answer["expires"] or float("inf"),
    )


def _plugin_main(path: str) -> int:
    """The child process: prints the result as JSON on stdout, or the error on stderr."""
    import subprocess

    from kubernetes.client import Configuration
    from kubernetes.config.config_exception import ConfigException
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    class BoundedPopen(subprocess.Popen[str]):
        """As the library uses it, which reads what plugins print without a limit."""

        def communicate(self, *_: object) -> tuple[str, str]:
            try:
                out, err = children.read_bounded(self, MAX_PLUGIN_BYTES)
            except ValueError as error:
                self.kill()
                raise OSError(f"{PLUGIN_PRINTED} {error}") from None
            return out.decode(errors="replace"), err.decode(errors="replace")

    subprocess.Popen = BoundedPopen  # type: ignore[assignment,misc]
    try:
        merger = KubeConfigMerger(path)
        # An OIDC provider may replace the refresh token, and the old one becomes invalid: save it.
        loader = KubeConfigLoader(merger.config, config_base_path=None, config_persister=merger.save_changes)
        config = Configuration()
        loader.load_and_set(config)
    except (ConfigException, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    token = config.api_key.get("BearerToken", "")
    expires = getattr(loader, "expiry", None)
    answer = {
        "authorization": token,
        "cert": _read_base64(config.cert_file),
        "key": _read_base64(config.key_file),
        "expires": expires.timestamp() if expires else 0,
    }
    if not token and not answer["cert"]:
        return 1  # the library has logged the reason
    print(json.dumps(answer))
    return 0


def _read_base64(path: str | None) -> str:
    return base64.b64encode(Path(path).read_bytes()).decode() if path else ""


if __name__ == "__main__":
    sys.exit(_plugin_main(sys.argv[1]))
