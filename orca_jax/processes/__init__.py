"""Child processes: starts, ends and reaps them, and exchanges lines of JSON. No JAX.

Imports nothing else of the package. Start with child_process.py; json_child.py adds questions and answers.
"""
