# SPDX-License-Identifier: Apache-2.0
"""The pages of `kbpf inspect`: rows, columns and text, from the values of model/inspection.py.
Nothing here prints or changes anything.
"""
