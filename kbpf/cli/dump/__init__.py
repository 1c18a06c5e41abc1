# SPDX-License-Identifier: Apache-2.0
"""The parts of `kbpf sysdump`: what they are, how each is collected, and what is removed."""
