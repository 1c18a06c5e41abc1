# SPDX-License-Identifier: Apache-2.0
"""Makes a desired state true in the kernel. One package per data plane, one protocol."""
