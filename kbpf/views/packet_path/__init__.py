"""Views of the packet path: connections, translated sources, devices."""
