# SPDX-License-Identifier: Apache-2.0
"""The API server as a source: credentials, LIST and WATCH."""
