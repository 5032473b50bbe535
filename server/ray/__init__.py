"""The server as an application of Ray Serve: replicas of the engine behind one address.

It needs the extra `ray`. Start with app.py. The parts: a door takes HTTP requests (door.py) and chooses an
engine (routing/), and each engine's replica runs the whole endpoint in its process (replica.py), with its
stages there or in actors of their own (stages/).
"""
