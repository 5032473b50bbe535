"""Parts of an iteration's measurement that other benchmarks share."""
