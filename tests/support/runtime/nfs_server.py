# SPDX-License-Identifier: Apache-2.0
"""The kernel's NFS server, in the network namespace of this process: `nfs_server.py SHARE
CLIENT...` exports a folder with NFSv4.1 to these addresses, prints a line once it serves, and ends
with its input. It mounts the server's control files, so it needs a mount namespace of its own.

rpc.mountd would answer the kernel's questions about clients and exports. Here the answers are
written in advance.
"""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

CONTROL = Path("/proc/fs/nfsd")
CACHES = Path("/proc/net/rpc")
LEASE_S = 10
"""The shortest that the kernel allows."""
INSECURE_PORT, ASYNC, NO_SUBTREE_CHECK, HAS_FSID = 0x2, 0x10, 0x400, 0x2000
"""Flags of an export (linux/nfsd/export.h)."""


def write(path: Path, text: str) -> None:
    path.write_text(text + "\n")


def serve(share: str, *clients: str) -> None:
    never = int(time.time()) + 86_400
    flags = INSECURE_PORT | ASYNC | NO_SUBTREE_CHECK | HAS_FSID
    for client in clients:
        write(CACHES / "auth.unix.ip/channel", f"nfsd {client} {never} lab")
    write(CACHES / "nfsd.export/channel", f"lab {share} {never} {flags} 65534 65534 0")
    write(CACHES / "nfsd.fh/channel", rf"lab 1 \x00000000 {never} {share}")
    # NFSv2 and 3 would need rpcbind; newer kernels do not know NFSv2.
    for version in ("-2", "-3"):
        with contextlib.suppress(OSError):
            write(CONTROL / "versions", version)
    for name in ("nfsv4leasetime", "nfsv4gracetime"):
        write(CONTROL / name, str(LEASE_S))
    write(CONTROL / "portlist", "tcp 2049")
    write(CONTROL / "threads", "2")
    # Newer kernels do not let us end the grace period, since nothing remembers clients here. Then
    # clients wait for its end.
    with contextlib.suppress(OSError):
        write(CONTROL / "v4_end_grace", "Y")


def main() -> None:
    subprocess.run(["mount", "-t", "nfsd", "nfsd", str(CONTROL)], check=True)
    serve(*sys.argv[1:])
    print("serves", flush=True)
    sys.stdin.read()
    write(CONTROL / "threads", "0")


main()
