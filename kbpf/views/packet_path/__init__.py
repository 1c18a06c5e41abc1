# SPDX-License-Identifier: Apache-2.0
"""Views of the packet path: availability, connections, SNAT, devices."""
