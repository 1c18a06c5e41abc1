# SPDX-License-Identifier: Apache-2.0
"""The sources of objects: a Kubernetes API server or a folder of YAML, turned into events."""
