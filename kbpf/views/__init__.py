# SPDX-License-Identifier: Apache-2.0
"""The rows that `kbpf inspect` shows, as values. Nothing here prints or changes anything."""
