"""Which backends serve which frontend, for whom. Pure: no I/O, clock, randomness or logging."""
