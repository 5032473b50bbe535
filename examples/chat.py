"""Reply to several conversations at once, and then continue one of them.

    python -m examples.chat [--model MODEL]

Without MODEL the demo model replies, which knows no roles: it continues the text of the messages.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from orca_jax import LLM, SamplingParams

OPENINGS = ("The king", "And he said", "In the beginning")


def main(argv: Sequence[str] | None = None) -> list[list[dict[str, Any]]]:
    """Show the conversations and return them."""
    parser = argparse.ArgumentParser(description="Reply to several conversations at once.")
    parser.add_argument("--model", help="a directory or a name on the hub, with a chat template")
    args = parser.parse_args(argv)
    sampling = SamplingParams(max_tokens=24, temperature=0.7, seed=3)
    conversations = [[{"role": "user", "content": text}] for text in OPENINGS]
    with LLM(args.model, max_batch_size=8) as llm:
        replies = llm.chat(conversations, sampling)  # all in the same iterations
        for conversation, reply in zip(conversations, replies, strict=True):
            conversation.append({"role": "assistant", "content": reply.text})
        first = conversations[0]
        first.append({"role": "user", "content": "And the people"})
        (reply,) = llm.chat(first, sampling)  # the beginning is in the prefix cache
        first.append({"role": "assistant", "content": reply.text})
    for conversation in conversations:
        for message in conversation:
            print(f"{message['role']}: {message['content']}")
        print()
    return conversations


if __name__ == "__main__":
    main()
