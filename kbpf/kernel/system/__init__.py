"""Mounts, cgroups, namespaces, processes, sysctls and threads."""
