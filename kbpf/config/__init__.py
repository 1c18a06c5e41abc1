# SPDX-License-Identifier: Apache-2.0
"""Reads and checks flags, environment variables and configuration files, and builds
model.Config.
"""
