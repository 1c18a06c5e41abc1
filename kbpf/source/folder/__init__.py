"""A folder of YAML as a source."""
