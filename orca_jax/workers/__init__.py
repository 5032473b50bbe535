"""A worker's controller, the supervisor of worker processes, and child processes that answer in JSON. No JAX.

A controller takes control messages and issues work to a device, which it knows as a protocol. Start with
controller.py. child_process.py starts, ends and reaps a process; json_child.py adds questions and answers.
"""
