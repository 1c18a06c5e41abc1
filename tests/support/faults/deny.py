# SPDX-License-Identifier: Apache-2.0
"""`python deny.py ERRNO COMMANDS -- WORDS...`: executes WORDS under a seccomp filter with which
bpf(2) fails with ERRNO, as on a kernel that is older or built without it. COMMANDS: numbers of enum
bpf_cmd, separated by commas; "" for all.
"""

import ctypes
import os
import platform
import struct
import sys

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LOAD, JUMP_IF, RETURN = 0x20, 0x15, 0x06
NUMBER, ARGUMENT = 0, 16
"""Offsets in struct seccomp_data: the system call's number, and its first argument."""
BPF = {"x86_64": 321, "aarch64": 280}

Code = tuple[int, int, int, int]


def rules(errno: int, commands: list[int]) -> list[Code]:
    """The filter in classic BPF: code, jt, jf, k of struct sock_filter."""
    refuse: Code = (RETURN, 0, 0, ERRNO | errno)
    allow: Code = (RETURN, 0, 0, ALLOW)
    made: list[Code] = [(LOAD, 0, 0, NUMBER), (JUMP_IF, 1, 0, BPF[platform.machine()]), allow]
    if commands:
        made.append((LOAD, 0, 0, ARGUMENT))
        for left, command in zip(range(len(commands), 0, -1), commands, strict=True):
            made.append((JUMP_IF, left, 0, command))
        made.append(allow)
    return [*made, refuse]


def install(codes: list[Code]) -> None:
    """Installs the filter for this process and everything it executes."""

    class Program(ctypes.Structure):
        _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    raw = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *code) for code in codes))
    program = Program(len(codes), ctypes.addressof(raw))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp")


if __name__ == "__main__":
    number, numbers, _, *words = sys.argv[1:]
    install(rules(int(number), [int(n) for n in numbers.split(",") if n]))
    os.execvp(words[0], words)
