"""Test-only helpers around `atoll.probe`: kernels in the interpreter's own process, mutated sources, ahead-of-time builds, compiled kernels run on a CPU."""
