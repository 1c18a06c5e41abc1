# SPDX-License-Identifier: Apache-2.0
"""A certificate authority of the tests: API server and fault proxy get their certificates here.

Certificates are made with the openssl command (Debian's openssl). They are real, because a test
that turns verification off would not notice a client that never verifies.
"""

import ipaddress
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_CA = """\
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
"""
_CLIENT = """\
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = clientAuth
"""
_SERVER = """\
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key, as PEM files."""

    crt: Path
    key: Path


class Authority:
    """A CA with its files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own = _make(folder, "ca", _CA, ())

    @property
    def crt(self) -> Path:
        """The CA's certificate, which a client has to trust."""
        return self._own.crt

    def issue(self, name: str, hosts: Iterable[str]) -> Certificate:
        """Return a server certificate that is valid for the names and addresses in `hosts`."""
        names = ",".join(sorted({f"{_kind(host)}:{host}" for host in hosts}))
        return _make(self._folder, name, f"{_SERVER}subjectAltName = {names}\n", self._signature())

    def issue_client(self, name: str, user: str, group: str) -> Certificate:
        """Return a client certificate for a user of Kubernetes in one group."""
        return _make(self._folder, name, _CLIENT, self._signature(), f"CN = {user}\nO = {group}\n")

    def _signature(self) -> tuple[str, ...]:
        return ("-CA", str(self._own.crt), "-CAkey", str(self._own.key))


def _kind(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "DNS"
    return "IP"


def _make(folder: Path, name: str, extensions: str, signed: tuple[str, ...], subject: str = "") -> Certificate:
    """Write NAME.crt and NAME.key, independently of the machine's openssl.cnf."""
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    config = folder / f"{name}.cnf"
    fields = subject or f"CN = kbpf tests {name}\n"
    request = f"[req]\ndistinguished_name = dn\nprompt = no\n[dn]\n{fields}"
    config.write_text(f"{request}[extensions]\n{extensions}")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    files = ("-keyout", str(made.key), "-out", str(made.crt), "-days", "3650")
    command = ["openssl", "req", "-x509", "-config", str(config), "-extensions", "extensions"]
    done = subprocess.run([*command, *curve, *files, *signed], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"openssl cannot write {made.crt}: {done.stderr.strip()}")
    return made
