# SPDX-License-Identifier: Apache-2.0
"""`kbpf demo`: network namespaces, backends and a client on this machine, without a cluster."""
