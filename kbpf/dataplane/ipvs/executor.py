# SPDX-License-Identifier: Apache-2.0
"""Reads and changes the kernel state of the IPVS data plane.

Virtual services and real servers are in IPVS (virtual_services.py), addresses on the dummy device,
everything else in the nftables table.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kbpf.dataplane.ipvs import ruleset
from kbpf.dataplane.ipvs.diff import Changes
from kbpf.dataplane.ipvs.ipvs_cleanup import ROOT_HINT, refuse_foreign_table
from kbpf.dataplane.ipvs.plan import Element, ServerPool, SetName
from kbpf.dataplane.ipvs.virtual_services import VirtualServices
from kbpf.errors import KernelError
from kbpf.kernel.net import dummy, ipvs
from kbpf.kernel.netfilter import forward_rules, nft
from kbpf.model.address import Addr
from kbpf.model.config import IPVS_DEVICE
from kbpf.model.desired import VirtualService
from kbpf.takeover import conntrack_keepalive


@dataclass(frozen=True, slots=True)
class KernelRefusals:
    """What the kernel refused, with its errors: addresses, and virtual services. `actual_pools`:
    what the kernel holds of these virtual services (None: nothing).
    """

    addresses: Mapping[Addr, str]
    virtuals: Mapping[VirtualService, str]
    actual_pools: Mapping[VirtualService, ServerPool | None]


class KernelState:
    """The kernel state of the agent. `warn` is called with warnings for the operator, once each.

    The constructor opens IPVS and creates the device and the table; it raises KernelError with what
    is missing.
    """

    def __init__(self, options: ruleset.RulesetOptions, warn: Callable[[str], None]) -> None:
        self._options = options
        self._table_summary: nft.TableSummary | None = None  # of the table as it was written
        self.nft_transactions = 0  # our nf_tables transactions
        self._nft_lock = threading.Lock()  # held while the number and the ruleset change
        self.services = VirtualServices(warn)
        try:
            _refuse_without_conntrack()
            self._ifindex = dummy.ensure(IPVS_DEVICE)
            self.write_table()
        except KernelError:
            self.services.close()
            raise

    def close(self) -> None:
        """Closes the socket; the kernel state stays."""
        self.services.close()

    def read_node_addresses(self) -> frozenset[Addr]:
        """The node's own addresses: those on any device except ours and kube-proxy's. What
        kube-proxy has on its device belongs to Services.
        """
        _, addresses = dummy.list_addresses(self._ifindex, *conntrack_keepalive.SERVICE_DEVICES)
        return addresses

    def address_families(self) -> frozenset[int]:
        """The families whose addresses the node accepts: 4, and 6 unless it is disabled."""
        return frozenset((4, 6) if dummy.accepts_ipv6(IPVS_DEVICE) else (4,))

    # ---- reading ---------------------------------------------------------------------------

    def read_elements(self) -> frozenset[Element]:
        """The elements of the table's sets. A damaged table or a missing device is created again
        first.
        """
        self._ifindex = dummy.ensure(IPVS_DEVICE)
        if not self.is_table_intact():
            self.write_table()
        return ruleset.parse_elements(forward_rules.run_transaction(ruleset.LIST_TABLE, hint=ROOT_HINT))

    def is_table_intact(self) -> bool:
        """Whether chains, rules and sets of the table are as we wrote them; another program may
        have flushed all rules. Missing elements are not detected.
        """
        return self._table_summary is not None and self._table_summary == nft.read_table("inet", ruleset.TABLE)

    def has_device(self) -> bool:
        """Whether the device exists and is the one that we created, not another one of its name."""
        return dummy.get_ifindex_or_zero(IPVS_DEVICE) == self._ifindex

    def read_addresses(self) -> frozenset[Addr]:
        """The addresses on the device."""
        return dummy.list_addresses(self._ifindex)[0]

    # ---- changing --------------------------------------------------------------------------

    def add_addresses(self, addresses: Iterable[Addr]) -> dict[Addr, str]:
        """Adds addresses to the device. Returns those that the kernel refused, with its errors."""
        return {address: str(error) for address, error in dummy.add_addresses(self._ifindex, addresses).items()}

    def write_table(self) -> None:
        """Creates what is missing of the table, and all its rules; elements are kept. Raises
        KernelError if another program owns a table of this name.
        """
        refuse_foreign_table()
        commands = ruleset.create_table(self._options)
        self._run_nft(commands)
        summary = nft.read_table("inet", ruleset.TABLE)
        # Another program may have flushed the table between the two calls. Then the summary must
        # not become the reference that is_table_intact() compares with.
        is_complete = summary is not None and len(summary.rules) == sum(
            "rule" in command.get("add", ()) for command in commands
        )
        self._table_summary = summary if is_complete else None

    def apply_additions(self, changes: Changes) -> KernelRefusals:
        """Executes steps 1 and 2 of the order. A refused address or virtual service does not stop
        the others. Raises KernelError if the elements are refused or the kernel does not answer.
        """
        steps = changes.steps()
        # One transaction: a map element or interval is replaced without a gap.
        self._run_nft([*ruleset.delete_elements(steps.removed_first), *ruleset.add_elements(steps.added_first)])
        addresses = self.add_addresses(_virtual_ips(steps.added_first))
        refused = self.services.apply_additions(changes)
        return KernelRefusals(
            addresses, refused, {virtual: self.services.read_current_pool(virtual) for virtual in refused}
        )

    def apply_removals(self, changes: Changes) -> None:
        """Executes the other steps of the order."""
        steps = changes.steps()
        self._run_nft([*ruleset.delete_elements(steps.removed_late), *ruleset.add_elements(steps.added_late)])
        self.services.delete(changes.old_pools)
        dummy.delete_addresses(self._ifindex, changes.unclaimed_addresses | {*_virtual_ips(steps.removed_late)})
        self._run_nft(ruleset.delete_elements(steps.removed_ownership))

    def _run_nft(self, commands: list[forward_rules.Json]) -> None:
        if commands:
            with self._nft_lock:
                forward_rules.run_transaction(*commands, hint=ROOT_HINT)
                self.nft_transactions += 1

    def read_foreign_generation(self) -> int:
        """The generation of nf_tables without our own transactions, each of which raises it by one.
        Any thread may call.
        """
        with self._nft_lock:
            return forward_rules.read_generation() - self.nft_transactions


def _refuse_without_conntrack() -> None:
    if ipvs.supports_conntrack() is False:
        raise KernelError(
            "IPVS of this kernel cannot masquerade",
            f"{ipvs.CONNTRACK_SYSCTL} is missing",
            "use a kernel with CONFIG_IP_VS_NFCT, or --mode bpf",
        )


def _virtual_ips(elements: Iterable[Element]) -> list[Addr]:
    return [Addr(parts[0]) for name, parts in elements if name is SetName.VIRTUAL_IPS and isinstance(parts[0], bytes)]
