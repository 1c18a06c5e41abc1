"""nf_tables, iptables, ipset and conntrack."""
