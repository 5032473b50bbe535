"""Scheduling policies from papers, each in one file: `--policy examples.policies.FILE:Class`.

`python -m bench.policies --trace FILE` compares them (docs/policy-study.md).
"""
