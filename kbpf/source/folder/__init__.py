# SPDX-License-Identifier: Apache-2.0
"""A folder of YAML as a source."""
