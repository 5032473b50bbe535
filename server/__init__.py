"""What stands before the engine: the command line. It knows the service's API and no JAX."""
