"""A Llama whose weights make it call a tool and then answer with a word of the tool's result.

A model with random weights would call no tool by itself, and agents leave the choice to the model. The
weights of this one are set by hand, so that a whole turn of an agent goes through everything that a server
has: chat template, tokenizer, attention over a long prompt, the parser of calls. It has a single layer, whose
attention heads look for

- the tokens before the current one, a head for each of N_BEFORE,
- the cue in the user's message, which says which errand is asked for,
- a tool's result, by the token that the template writes before it,
- one of WORDS, wherever the prompt has it.

The feed-forward layer has a unit for each token of the replies. It is active where the latest tokens, the cue
and whether there is a result all match, and writes which token comes next. At the place of the word, that is
the word which attention found: only a model that has read the tool's result can say it.
"""

import json
import math
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
DEMO_TOKENIZER = ROOT / "orca_jax" / "demo_model" / "tokenizer.json"  # byte-level BPE, 2,048 tokens
TEMPLATE = ROOT / "tests" / "endpoint" / "data" / "chat_templates" / "qwen3.jinja"  # as Qwen published it

WORDS = ("drizzle", "sleet", "squall", "hoarfrost")  # what a file or a tool of a test may say
RESULT = "<tool_response>"  # what the template writes before a result
SLOT = "{word}"  # in an answer, where the word of the result stands
POSITIONS = 131_072


class Errand(NamedTuple):
    """The model's reaction to a message with `cue`: it calls a tool, and answers with the result's word."""

    cue: str
    tool: str
    arguments: Mapping[str, str]

    @property
    def call(self) -> str:
        """The reply that calls the tool, as Qwen's models write it."""
        call = json.dumps({"name": self.tool, "arguments": self.arguments})
        return f"<tool_call>\n{call}\n</tool_call>"


ANSWER = f"It says {SLOT}, as you asked."
ERRANDS = (
    Errand("Read note.txt", "Bash", {"command": "cat note.txt", "description": "Read"}),  # Claude Code's tool
    Errand("Print note.txt", "exec_command", {"cmd": "cat note.txt"}),  # Codex's
    Errand("weather in Rome", "weather", {"place": "Rome"}),
)
CUES = tuple(errand.cue for errand in ERRANDS)

N_BEFORE = 3  # tokens before the current one that tell a place in a reply
HEAD = 32
THETA = 1e6
N_SHARP = 12  # pairs of a head that turn fast enough to tell one position from the next
SLOW = HEAD // 2 - 1  # the pair that hardly turns within POSITIONS
ATTENDED = 300.0  # score of a key that a head looks for; others have 0
END = "<|im_end|>"

Entries = dict[tuple[int, ...], float]  # of a tensor that is zero elsewhere


def tokenizer() -> dict[str, Any]:
    """The demo model's tokenizer with the tokens of Qwen's template, the cues and the words."""
    described = json.loads(DEMO_TOKENIZER.read_text())
    size = len(described["model"]["vocab"])
    special = ("<|im_start|>", END)
    added = (*special, "<tool_call>", "</tool_call>", RESULT, "</tool_response>", "<think>", "</think>")
    for i, text in enumerate((*added, *CUES, *WORDS)):
        token = {"id": size + i, "content": text, "special": text in special}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        described["added_tokens"].append(token | flags)
    return described


class Step(NamedTuple):
    """A token of a reply, and what it follows from."""

    before: tuple[str, ...]  # the current token, and those before it, the latest first
    cue: int
    answered: bool
    then: str  # the token, or SLOT


def steps(pieces: Tokenizer) -> Iterator[Step]:
    """Every token of every reply. Raises ValueError if two follow from the same."""
    begun = [_symbol(piece) for piece in pieces.encode("<|im_start|>assistant\n").tokens]
    seen = set[tuple[tuple[str, ...], int, bool]]()
    for cue, errand in enumerate(ERRANDS):
        for answered, reply in enumerate((errand.call, ANSWER)):
            head, *tail = reply.split(SLOT)
            said = pieces.encode(head).tokens
            for rest in tail:
                said += [SLOT, *pieces.encode(rest).tokens]
            context = list(begun)
            for piece in (*said, END):
                before = tuple(context[: -N_BEFORE - 2 : -1])
                if (before, cue, bool(answered)) in seen:
                    raise ValueError(f"{errand.cue}: after {before} both {piece!r} and another token come")
                seen.add((before, cue, bool(answered)))
                yield Step(before, cue, bool(answered), piece)
                context.append(_symbol(piece))


def _symbol(piece: str) -> str:
    return SLOT if piece in WORDS else piece


def _codes(n: int) -> list[tuple[int, ...]]:
    """`n` vectors of HEAD signs, of which no two agree in more than three of four places."""
    rng = random.Random(0)
    codes = list[tuple[int, ...]]()
    while len(codes) < n:
        code = tuple(rng.choice((-1, 1)) for _ in range(HEAD))
        if all(abs(sum(a * b for a, b in zip(code, other, strict=True))) <= HEAD // 2 for other in codes):
            codes.append(code)
    return codes


class Dimensions:
    """The hidden state: named groups of dimensions, one after the other."""

    def __init__(self, **sizes: int) -> None:
        self._start = dict[str, int]()
        self.size = 0
        for name, size in sizes.items():
            self._start[name] = self.size
            self.size += size

    def __call__(self, name: str, i: int = 0) -> int:
        return self._start[name] + i


def weights(pieces: Tokenizer) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], Entries]]]:
    """The fields of config.json that follow from the replies, and each tensor's shape and entries."""
    replies = list(steps(pieces))
    symbols = {name: i for i, name in enumerate(sorted({name for step in replies for name in step.before}))}
    outputs = {name: i for i, name in enumerate(sorted({step.then for step in replies}))}
    codes = _codes(len(symbols))
    at = Dimensions(
        one=1,  # 1 in every token's embedding, which with its symbol and its kind has three ones
        symbol=len(symbols) + 1,
        plain=1,
        cue=len(ERRANDS),
        result=1,
        word=len(WORDS),
        before=N_BEFORE * HEAD,  # what attention writes: codes of the tokens before, ...
        asked=len(ERRANDS),
        answered=1,
        found=len(WORDS),
        then=len(outputs),  # what the feed-forward layer writes
    )
    hidden = -(-at.size // 32) * 32
    vocabulary = pieces.get_vocab_size()

    embedding: Entries = {}
    output: Entries = {}
    for token in range(vocabulary):
        name = pieces.id_to_token(token) or ""
        kind = at("plain")
        if name == RESULT:
            kind = at("result")
        elif name in WORDS:
            kind = at("word", WORDS.index(name))
            output[token, at("then", outputs[SLOT])] = 20.0
            output[token, at("found", WORDS.index(name))] = 60.0
        elif name in CUES:
            kind = at("cue", CUES.index(name))
        if name in outputs:
            output[token, at("then", outputs[name])] = 20.0
        for i in (at("one"), at("symbol", symbols.get(_symbol(name), len(symbols))), kind):
            embedding[token, i] = 1.0

    unit = math.sqrt(hidden / 3)  # a one of an embedding, after the norm
    look = math.sqrt(ATTENDED * math.sqrt(HEAD)) / unit
    query: Entries = {}
    key: Entries = {}
    value: Entries = {}
    mix: Entries = {}
    for head in range(N_BEFORE):
        first = head * HEAD
        for pair in range(N_SHARP):
            # The key is turned as if it stood where the query does.
            angle = (head + 1) * THETA ** (-2 * pair / HEAD)
            query[first + pair, at("one")] = look
            key[first + pair, at("one")] = look * math.cos(angle)
            key[first + pair + HEAD // 2, at("one")] = look * math.sin(angle)
        for i in range(HEAD):
            for symbol, code in enumerate(codes):
                value[first + i, at("symbol", symbol)] = code[i] / math.sqrt(HEAD) / unit
            mix[at("before", first + i), first + i] = 1.0
    sought = [
        ([at("cue", i) for i in range(len(ERRANDS))], "asked"),
        ([at("result")], "answered"),
        ([at("word", i) for i in range(len(WORDS))], "found"),
    ]
    for head, (kinds, name) in enumerate(sought, N_BEFORE):
        first = head * HEAD
        query[first + SLOW, at("one")] = look
        for i, kind in enumerate(kinds):
            key[first + SLOW, kind] = look
            value[first + i, kind] = 1 / unit
            mix[at(name, i), first + i] = 1.0
    n_heads = N_BEFORE + len(sought)

    gate: Entries = {}
    up: Entries = {}
    down: Entries = {}
    for i, step in enumerate(replies):
        match: dict[int, float] = {at("symbol", symbols[step.before[0]]): 1.0, at("asked", step.cue): 1.0}
        for head, name in enumerate(step.before[1:]):
            for j, sign in enumerate(codes[symbols[name]]):
                match[at("before", head * HEAD + j)] = sign / math.sqrt(HEAD)
        match[at("answered")] = 1.0 if step.answered else -1.0
        n_ones = len(step.before) + 1 + step.answered
        match[at("one")] = -(n_ones - 0.25)
        for dimension, factor in match.items():
            gate[i, dimension] = 40 * factor
        up[i, at("one")] = 1.0
        down[at("then", outputs[step.then]), i] = 0.12
    layer, n_units = "model.layers.0.", len(replies)
    ones: Entries = {(i,): 1.0 for i in range(hidden)}
    tensors = {
        "model.embed_tokens.weight": ((vocabulary, hidden), embedding),
        layer + "input_layernorm.weight": ((hidden,), ones),
        layer + "self_attn.q_proj.weight": ((n_heads * HEAD, hidden), query),
        layer + "self_attn.k_proj.weight": ((n_heads * HEAD, hidden), key),
        layer + "self_attn.v_proj.weight": ((n_heads * HEAD, hidden), value),
        layer + "self_attn.o_proj.weight": ((hidden, n_heads * HEAD), mix),
        layer + "post_attention_layernorm.weight": ((hidden,), ones),
        layer + "mlp.gate_proj.weight": ((n_units, hidden), gate),
        layer + "mlp.up_proj.weight": ((n_units, hidden), up),
        layer + "mlp.down_proj.weight": ((hidden, n_units), down),
        "model.norm.weight": ((hidden,), ones),
        "lm_head.weight": ((vocabulary, hidden), output),
    }
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": n_units,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_heads,
    }
    return sizes, tensors


def write_safetensors(path: Path, tensors: Mapping[str, tuple[Sequence[int], Entries]]) -> None:
    """A file of float32 tensors, from their shapes and the entries that are not zero."""
    header, data = dict[str, Any](), bytearray()
    for name, (shape, entries) in tensors.items():
        start = len(data)
        data += bytes(4 * math.prod(shape))
        for place, entry in entries.items():
            flat = 0
            for index, size in zip(place, shape, strict=True):
                flat = flat * size + index
            struct.pack_into("<f", data, start + 4 * flat, entry)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_model(directory: Path) -> None:
    """The checkpoint, as transformers would have saved it."""
    described = tokenizer()
    pieces = Tokenizer.from_str(json.dumps(described))
    sizes, tensors = weights(pieces)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "head_dim": HEAD,
        "max_position_embeddings": POSITIONS,
        "rope_theta": THETA,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": pieces.token_to_id(END),
        "torch_dtype": "float32",
        **sizes,
    }
    files = {
        "config.json": config,
        "tokenizer.json": described,
        "tokenizer_config.json": {"eos_token": END, "model_max_length": POSITIONS},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    (directory / "chat_template.jinja").write_text(TEMPLATE.read_text())
    write_safetensors(directory / "model.safetensors", tensors)
