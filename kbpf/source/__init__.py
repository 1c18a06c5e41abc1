"""Where objects come from: a Kubernetes API server or a folder of YAML, turned into events."""
