# SPDX-License-Identifier: Apache-2.0
"""Values that the packages exchange: frozen, comparable, without I/O."""
