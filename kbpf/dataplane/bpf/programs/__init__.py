# SPDX-License-Identifier: Apache-2.0
"""The BPF programs: compile, load, pin, and whose programs are attached."""
