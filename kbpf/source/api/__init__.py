"""The API server as a source: credentials, LIST and WATCH."""
