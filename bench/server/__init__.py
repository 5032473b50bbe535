"""The server under load, under failures and in a soak, each a command."""
