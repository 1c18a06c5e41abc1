"""The BPF data plane: compile, load, plan, write."""
