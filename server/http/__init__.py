"""The HTTP endpoint: OpenAI's and Anthropic's APIs, and routes for operators such as /health and /metrics.

Start with app.py. The four APIs that generate (generation/, responses/, messages/) differ in their fields and
in how they write a reply; a conversation becomes a prompt in generation/prepared_reply.py for all of them.
The room knows server/gateway, and neither server/rpc nor JAX.
"""
