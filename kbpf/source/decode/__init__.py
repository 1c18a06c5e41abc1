# SPDX-License-Identifier: Apache-2.0
"""Decodes Kubernetes JSON and YAML into model objects."""
