# SPDX-License-Identifier: Apache-2.0
"""Take-over from kube-proxy: detecting it, draining it and removing what it left behind."""
