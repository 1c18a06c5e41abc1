# SPDX-License-Identifier: Apache-2.0
"""The agent: one thread that reads events, applies the policy and writes to the data plane."""
