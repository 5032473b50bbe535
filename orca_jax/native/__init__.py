"""Split attention in C for CPUs, built by the machine's own compiler when an engine starts."""
