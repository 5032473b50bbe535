"""Child processes: started, talked to in lines of JSON, ended and reaped. No JAX.

Knows nothing else of the package. Start with child_process.py; json_child.py adds questions and answers.
"""
