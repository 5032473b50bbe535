"""What XLA and Mosaic make of the programs, read from what they compiled; no GPU is needed."""
