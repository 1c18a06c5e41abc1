"""The packet path: which devices run the TC programs, and what those need to know."""
