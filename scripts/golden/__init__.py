"""Golden files: what transformers and the trainers' own code compute, for the tests to compare with."""
