"""What the agent publishes: health checks, metrics and Kubernetes Events."""
