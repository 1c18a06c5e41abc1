# SPDX-License-Identifier: Apache-2.0
"""nf_tables, iptables, ipset and conntrack."""
