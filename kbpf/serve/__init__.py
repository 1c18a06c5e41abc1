"""What others read from the agent: health, metrics, events. Handed values only."""
