# SPDX-License-Identifier: Apache-2.0
"""Thin typed wrappers of kernel interfaces, one module each. They know nothing about Services."""
