"""Settings of the server's own process: sockets, file descriptors, memory and the Python interpreter."""
