"""The command line: nouns show, verbs change."""
