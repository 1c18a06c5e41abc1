"""`kbpf demo`: network namespaces, backends and a client on this machine, without a cluster."""
