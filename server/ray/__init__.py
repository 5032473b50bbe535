"""The server as an application of Ray Serve: replicas of the engine behind one address.

It needs the extra `ray`. Start with app.py. A door takes HTTP requests (door.py) and chooses an engine
(routing/). Each engine's replica runs the whole endpoint in its process (replica.py), and its stages there or
in one actor each (stages.py).
"""
