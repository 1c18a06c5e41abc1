# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of speed and memory. `make bench` or `python -m benchmarks NAME`; see README.md."""
