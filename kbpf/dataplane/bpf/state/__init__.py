# SPDX-License-Identifier: Apache-2.0
"""From a desired state to ordered map writes: adopt, plan, admit, commit, retire."""
