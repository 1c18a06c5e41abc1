# SPDX-License-Identifier: Apache-2.0
"""The IPVS data plane: virtual services of the kernel, and an nftables table of our own."""
