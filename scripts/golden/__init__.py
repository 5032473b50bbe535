"""Makes golden files: results of transformers and of trainers' code, for the tests to compare with."""
