"""The BPF programs: compile, load, pin, and whose programs are attached."""
