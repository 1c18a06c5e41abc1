# SPDX-License-Identifier: Apache-2.0
"""The packet path: which devices run the TC programs, and what those need to know."""
