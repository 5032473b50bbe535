"""The gRPC endpoint: `orca.v1.Generation`."""
