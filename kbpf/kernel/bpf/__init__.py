"""bpf(2), BPF objects, TC attachment and feature probes."""
