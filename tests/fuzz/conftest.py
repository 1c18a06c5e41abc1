# SPDX-License-Identifier: Apache-2.0
"""The fixture that the bounded parts of the campaigns need: the programs, compiled once."""

from tests.support.plane import artifact_cache

__all__ = ["artifact_cache"]
