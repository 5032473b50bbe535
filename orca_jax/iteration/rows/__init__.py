"""The kinds of rows: each says in one file what enters the message, what comes back, and how it is accepted.

Start with plain.py and message_builder.py, which concatenates all kinds' rows. A new kind is a `RowKind`
(request/request.py) in a file of its own. No JAX.
"""
