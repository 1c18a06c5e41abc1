"""Views of the packet path: availability, connections, SNAT, devices."""
