# SPDX-License-Identifier: Apache-2.0
"""What the agent publishes: health checks, metrics and Kubernetes Events."""
