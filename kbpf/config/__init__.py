"""Reads and checks flags, environment variables and configuration files, and builds
model.Config.
"""
