"""The command line and the endpoints of an engine. They use the service's API and import no JAX."""
