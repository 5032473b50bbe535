"""A stage's compiled programs, and the worker that feeds them.

Which kernel runs where is chosen here. Start with worker.py, then stage.py.
"""
