# SPDX-License-Identifier: Apache-2.0
"""`kbpf check`: what kbpf needs of this kernel and node, one row per requirement."""
