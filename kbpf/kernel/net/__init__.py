"""Network devices, addresses and sockets, mostly through netlink."""
