# SPDX-License-Identifier: Apache-2.0
"""The BPF maps: layouts, pins, and the maps that the agent writes."""
