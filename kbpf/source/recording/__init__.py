# SPDX-License-Identifier: Apache-2.0
"""Recordings: the objects and events of a cluster as a file that any machine can replay."""
