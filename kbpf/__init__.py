# SPDX-License-Identifier: Apache-2.0
"""kbpf: the Services of a Kubernetes node, balanced by BPF."""

__version__ = "0.1.0"
