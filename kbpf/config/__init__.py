"""Files and flags, read and checked, become model.Config."""
