"""How fast, and how much memory. `make bench`, or `python -m benchmarks NAME`; JSON on stdout."""
