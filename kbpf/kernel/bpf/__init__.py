# SPDX-License-Identifier: Apache-2.0
"""bpf(2), BPF objects, TC attachment and feature probes."""
