"""The proxy of `orca route`, which drives servers that compute prompts and servers that generate.

It knows neither engines nor the servers' endpoints, only HTTP. Read proxy.py first.
"""
