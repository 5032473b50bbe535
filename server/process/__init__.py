"""The server's own process: its addresses, file descriptors, memory and interpreter."""
