"""The sources of objects: a Kubernetes API server or a folder of YAML, turned into events."""
