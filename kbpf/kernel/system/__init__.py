# SPDX-License-Identifier: Apache-2.0
"""Mounts, cgroups, namespaces, processes, sysctls and threads."""
