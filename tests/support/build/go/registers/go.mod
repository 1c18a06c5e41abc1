// porcupine, a checker of linearizability, and main.go, which judges the histories of
// tests/chaos/registers.py by it.
module kbpf.invalid/tests/support/go/registers

go 1.25.0

require github.com/anishathalye/porcupine v1.0.2
