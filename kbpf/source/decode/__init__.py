"""Kubernetes JSON and YAML to model objects."""
