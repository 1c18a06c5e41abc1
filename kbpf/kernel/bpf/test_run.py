# SPDX-License-Identifier: Apache-2.0
"""BPF_PROG_TEST_RUN of TC programs: runs one on a packet of ours, or sends that packet by a device.

A program that calls bpf_clone_redirect() really sends, also in a test run. So a packet can be put
in front of a device's hooks without a socket, another device or a namespace: at ingress as if the
device had received it, at egress as if the stack sent it.
"""

import ctypes
import struct
from typing import Final

from kbpf.kernel.bpf import syscalls
from kbpf.kernel.bpf.clsact import Direction
from kbpf.kernel.bpf.objects import Program
from kbpf.kernel.bpf.uapi import BPF_F_INGRESS, BPF_PROG_TYPE_SCHED_CLS, BPF_FUNC_clone_redirect

_CONTEXT: Final = struct.Struct("=40xI")  # struct __sk_buff up to ifindex

_MAX_FRAME: Final = 1 << 12
"""The kernel accepts less than a page, and no program of ours makes a packet longer."""


def run_program(program: Program, frame: bytes, ifindex: int) -> int:
    """Runs the program once on a frame of this device of the caller's network namespace; returns
    what the program returns. Raises KernelError.
    """
    result, _ = run_on_packet(program, frame, ifindex)
    return result


def run_on_packet(program: Program, frame: bytes, ifindex: int) -> tuple[int, bytes]:
    """Like run_program(), but also returns the frame as the program leaves it."""
    context = _CONTEXT.pack(ifindex)
    buffer = ctypes.create_string_buffer(_MAX_FRAME)
    opts = syscalls.TestRunOpts(
        data_in=frame,
        data_out=ctypes.addressof(buffer),
        data_size_in=len(frame),
        data_size_out=_MAX_FRAME,
        ctx_in=context,
        ctx_size_in=len(context),
    )
    result = syscalls.lib().bpf_prog_test_run_opts(program.fd, ctypes.byref(opts))
    syscalls.check(result, "cannot run the program", program.name)
    return ctypes.c_int32(opts.retval).value, buffer.raw[: opts.data_size_out]


def send(frame: bytes, ifindex: int, direction: Direction) -> None:
    """Sends a frame with an Ethernet header through the hooks of this device, and on from there. A
    device without such a header gets it without. Raises KernelError.
    """
    flags = BPF_F_INGRESS if direction is Direction.INGRESS else 0
    code = syscalls.encode_insns(
        (0xB7, 2, 0, ifindex),  # r2 = ifindex
        (0xB7, 3, 0, flags),  # r3 = flags
        (0x85, 0, 0, BPF_FUNC_clone_redirect),
        (0x95, 0, 0, 0),
    )
    with Program.load("kbpf_send", BPF_PROG_TYPE_SCHED_CLS, 0, code) as program:
        run_program(program, frame, ifindex)  # its result is an errno if the frame was dropped
