# SPDX-License-Identifier: Apache-2.0
"""Reads the pinned maps and links for `kbpf inspect`; works while the agent is down."""
