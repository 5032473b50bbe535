"""Where an engine's stages run: its GPUs as a placement group, and an actor for each stage on another node.

placement.py says what an engine takes of the cluster, and stage_actors.py starts the actors (stage_actor.py).
"""
