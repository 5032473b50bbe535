"""What runs in an iteration on a stage's devices: its compiled programs, and the worker that feeds them.

Which kernel runs where is chosen here; what builds an engine of these is in launch/. Start with worker.py,
then stage_programs.py, which has a function for each program.
"""
