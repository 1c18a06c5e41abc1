# SPDX-License-Identifier: Apache-2.0
"""Functions of conntrack that a program may call (kfuncs), for bpf/tc/conntrack.h.

A call names its function by an id in the BTF of the kernel or of the module that has it, and the
module by the descriptor of its BTF. The compiled program has placeholders instead. Others stand for
the offsets of members that it reads itself.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

from kbpf.errors import KernelError
from kbpf.kernel.bpf import btf, kernel_members, probe
from kbpf.kernel.bpf.btf import BTF_KIND_FUNC, Btf
from kbpf.kernel.bpf.syscalls import encode_insns
from kbpf.kernel.probe_result import Probe
from kbpf.kernel.system import modules

PLACEHOLDERS: Final = {
    0x6B620001: "bpf_skb_ct_alloc",
    0x6B620002: "bpf_skb_ct_lookup",
    0x6B620003: "bpf_ct_set_timeout",
    0x6B620004: "bpf_ct_change_timeout",
    0x6B620005: "bpf_ct_insert_entry",
    0x6B620006: "bpf_ct_release",
    0x6B620007: "bpf_ct_set_nat_info",
}
STATUS_PLACEHOLDER: Final = 0x6B620008
TCP_STATE_PLACEHOLDER: Final = 0x6B620009
NFCT_PLACEHOLDER: Final = 0x6B62000A
TIMEOUT_PLACEHOLDER: Final = 0x6B62000B
ENTRY_PLACEHOLDER: Final = 0x6B62000C
_PLACES: Final = (
    STATUS_PLACEHOLDER,
    TCP_STATE_PLACEHOLDER,
    NFCT_PLACEHOLDER,
    TIMEOUT_PLACEHOLDER,
    ENTRY_PLACEHOLDER,
)
MODULES: Final = ("nf_conntrack", "nf_nat")
"""The modules that have the functions, unless they are built into the kernel."""
BPF_PSEUDO_KFUNC_CALL: Final = 2


class ConntrackCalls(NamedTuple):
    """`replacements`: the instruction that calls a placeholder → the instruction for this kernel.
    `btf_fds`: descriptors of the modules' BTF. A replacement names a module by its index here;
    index 0 means the kernel itself and holds no descriptor.
    """

    replacements: dict[bytes, bytes]
    btf_fds: tuple[int, ...]


NO_CONNTRACK: Final = ConntrackCalls({probe.encode_call(place): probe.encode_r0(0) for place in _PLACES}, ())
"""For programs that also run without conntrack."""


@contextmanager
def open_conntrack() -> Iterator[ConntrackCalls]:
    """What replaces the placeholders on this kernel; valid as long as the context. Raises
    KernelError that names what the kernel lacks.
    """
    if not (read := kernel_members.probe_read()).works:
        raise KernelError(f"programs may not read the kernel's memory: {read.reason}")
    with ExitStack() as stack:
        kernel = stack.enter_context(Btf.load())
        sources = [kernel]
        btf_fds = [0]
        if any(not kernel.find(name, BTF_KIND_FUNC) for name in PLACEHOLDERS.values()):
            for name, btf_id, fd in btf.open_modules():
                stack.enter_context(fd)
                if name in MODULES and (module := kernel.load_module(btf_id)) is not None:
                    sources.append(stack.enter_context(module))
                    btf_fds.append(fd.fd)
        replacements = {
            probe.encode_call(number): _encode_kfunc_call(sources, name) for number, name in PLACEHOLDERS.items()
        }
        places = {
            STATUS_PLACEHOLDER: _find_member(sources, "nf_conn", "status"),
            TCP_STATE_PLACEHOLDER: _find_member(sources, "nf_conn", "proto")
            + _find_member(sources, "ip_ct_tcp", "state"),
            NFCT_PLACEHOLDER: _find_member(sources, "sk_buff", "_nfct"),
            TIMEOUT_PLACEHOLDER: _find_member(sources, "nf_conn", "timeout"),
            ENTRY_PLACEHOLDER: _find_member(sources, "nf_conn", "tuplehash")
            + _find_member(sources, "nf_conntrack_tuple_hash", "tuple"),
        }
        replacements |= {probe.encode_call(number): probe.encode_r0(place) for number, place in places.items()}
        yield ConntrackCalls(replacements, tuple(btf_fds))


def probe_conntrack() -> Probe:
    """Whether a program can write entries of conntrack. Unknown if the modules are not loaded:
    nothing is loaded.
    """
    try:
        with open_conntrack():
            return Probe(True)
    except KernelError as error:
        probes = {name: modules.probe_module(name) for name in MODULES}
        missing = [name for name, module in probes.items() if module.reason]
        if missing and all(module.works is not False for module in probes.values()):
            return Probe(None, f"not loaded: {', '.join(missing)}; the agent loads them if needed")
        return Probe(False, str(error))


def _encode_kfunc_call(sources: list[Btf], name: str) -> bytes:
    for index, source in enumerate(sources):
        if function_id := source.find(name, BTF_KIND_FUNC):
            return encode_insns((0x85, BPF_PSEUDO_KFUNC_CALL << 4, index, function_id))
    raise KernelError(f"the kernel has no {name}() for programs, or no BTF of its module")


def _find_member(sources: list[Btf], struct_name: str, member_name: str) -> int:
    """The offset of a member in bytes."""
    for source in sources:
        if bit := source.find_member_bit(struct_name, member_name):
            return bit // 8
    raise KernelError(f"the kernel's BTF has no {struct_name}.{member_name}")
