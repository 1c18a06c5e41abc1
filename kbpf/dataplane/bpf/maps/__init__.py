"""The BPF maps: layouts, pins, and the maps that the agent writes."""
