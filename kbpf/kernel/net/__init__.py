# SPDX-License-Identifier: Apache-2.0
"""Network devices, addresses and sockets, mostly through netlink."""
