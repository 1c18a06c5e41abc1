"""Network devices, addresses and sockets, mostly by netlink."""
