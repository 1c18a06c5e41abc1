"""Decodes Kubernetes JSON and YAML into model objects."""
