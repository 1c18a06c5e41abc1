# SPDX-License-Identifier: Apache-2.0
"""The BPF data plane: compile, load, plan, write."""
