# SPDX-License-Identifier: Apache-2.0
"""Decides which backends serve which frontend, and for which clients. Pure: no I/O, clock,
randomness or logging.
"""
