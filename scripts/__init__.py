"""What makes files that the repository keeps: the demo model, the golden files."""
