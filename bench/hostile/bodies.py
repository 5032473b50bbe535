"""Attacks by request bodies: JSON that is expensive for its size."""

from bench.hostile.target import CHAT, COMPLETIONS, Target

_MOST = (4 << 20) - 64  # a little less than the server's default limit in bytes


def _names_and_one_twice(n_bytes: int) -> bytes:
    """An object with short names, the last of which is duplicated."""
    n = n_bytes // 13 - 1
    names = ",".join(f'"a{i:07}":0' for i in range(n))
    return f'{{{names},"a{n - 1:07}":0}}'.encode()


def _filled(before: bytes, piece: bytes, after: bytes, *, most: int = _MOST) -> bytes:
    """Join as many pieces with commas as fit."""
    n = (most - len(before) - len(after)) // (len(piece) + 1)
    return before + b",".join([piece] * n) + after


async def duplicate_keys(target: Target) -> None:
    """Objects of 104 KB with a duplicate name at the end."""
    await target.flood(2, [target.post(COMPLETIONS, _names_and_one_twice(104_000))])


async def duplicate_keys_4_mb(target: Target) -> None:
    """Objects of 4 MB with a duplicate name, which once blocked the event loop for half an hour."""
    await target.flood(1, [target.post(COMPLETIONS, _names_and_one_twice(_MOST))])


async def deep_nests(target: Target) -> None:
    """Nested arrays and objects, as deep as fit into 4 MB."""
    inner = b'{"prompt":' + b"[" * 900 + b"1" + b"]" * 900 + b"}"
    bodies = (
        b"[" * _MOST,
        b'{"a":' * (_MOST // 5),
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        inner,
        _filled(b'{"prompt":[', b"[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]", b"]}"),
        _filled(b'{"messages":[', b'{"role":"user","content":[[[[{"a":{"b":[[]]}}]]]]}', b"]}"),
    )
    await target.flood(2, [target.post(path, body) for body in bodies for path in (COMPLETIONS, CHAT)])


async def two_million_integers(target: Target) -> None:
    """Lists of up to 2 million elements: one prompt, prompts of one token or letter, messages, tokens."""
    requests = [
        target.post(COMPLETIONS, _filled(b'{"prompt":[', b"1", b"]}")),
        target.post(COMPLETIONS, _filled(b'{"prompt":[', b"[1]", b"]}")),
        target.post(COMPLETIONS, _filled(b'{"prompt":[', b'"a"', b"]}")),
        target.post(CHAT, _filled(b'{"messages":[', b"1", b"]}")),
        target.post("/detokenize", _filled(b'{"tokens":[', b"5", b"]}")),
    ]
    await target.flood(2, requests)


async def empty_messages(target: Target) -> None:
    """130,000 empty messages."""
    body = _filled(b'{"max_tokens":1,"messages":[', b'{"role":"user","content":""}', b"]}")
    parts = _filled(
        b'{"max_tokens":1,"messages":[{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}"
    )
    tokenize = body.replace(b'"max_tokens":1,', b"")
    requests = [target.post(CHAT, body), target.post(CHAT, parts), target.post("/tokenize", tokenize)]
    await target.flood(2, requests)


async def long_texts(target: Target) -> None:
    """4 MB of text to encode: one letter, many letters, lone surrogates, escapes."""
    texts = (
        b"a" * (_MOST - 100),
        b"the quick brown fox " * (_MOST // 20 - 10),
        "日本語\N{GRINNING FACE} ".encode() * (_MOST // 14 - 10),
        b"\\ud83d\\ude00" * (_MOST // 12 - 10),
        b"\\ud83d" * (_MOST // 6 - 20),
        b"\\n\\t" * (_MOST // 4 - 20),
    )
    bodies = [b'{"prompt":"' + text + b'"}' for text in texts]
    chats = [b'{"messages":[{"role":"user","content":"' + text + b'"}]}' for text in texts]
    requests = [target.post(COMPLETIONS, body) for body in bodies]
    requests += [target.post("/tokenize", body) for body in bodies[:3]]
    requests += [target.post(CHAT, body) for body in chats]
    await target.flood(4, requests)


async def long_numbers(target: Target) -> None:
    """Numbers of a million digits, and unknown fields of 4 MB."""
    digits = b"1" * (_MOST - 100)
    bodies = (
        b'{"prompt":"a","max_tokens":' + digits + b"}",
        b'{"prompt":"a","temperature":0.' + digits + b"}",
        b'{"prompt":"a","temperature":1e' + digits + b"}",
        b'{"prompt":"a","seed":' + b"1" * 4300 + b"}",
        b'{"prompt":"a","' + digits + b'":1}',
        b'{"prompt":"a","model":"' + digits + b'"}',
        _filled(b'{"prompt":"a","temperature":[', b"1.000001e-5", b"]}"),
    )
    await target.flood(2, [target.post(COMPLETIONS, body) for body in bodies])


async def huge_biases(target: Target) -> None:
    """`logit_bias` and `allowed_token_ids` at and far beyond their limits, for one choice and for 128."""
    bias = ",".join(f'"{i}":1' for i in range(2048)).encode()
    too_many = ",".join(f'"{i}":1' for i in range(300_000)).encode()
    allowed = ",".join(map(str, range(2048))).encode()
    bodies = (
        b'{"prompt":"a","max_tokens":4,"n":128,"logit_bias":{' + bias + b"}}",
        b'{"prompt":"a","max_tokens":4,"logit_bias":{' + too_many + b"}}",
        b'{"prompt":"a","max_tokens":4,"n":128,"allowed_token_ids":[' + allowed + b"]}",
        _filled(b'{"prompt":"a","max_tokens":4,"n":128,"allowed_token_ids":[', b"7", b"]}"),
        _filled(b'{"prompt":"a","max_tokens":4,"stop_token_ids":[', b"7", b"]}"),
    )
    await target.flood(4, [target.post(COMPLETIONS, body) for body in bodies])


_CHAT = b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1'


async def tools_of_ones(target: Target) -> None:
    """A list of 900,000 numbers in place of tools, which once gave an error for each."""
    body = _CHAT + b',"tools":[' + b"1," * 900_000 + b"1]}"
    await target.flood(2, [target.post(CHAT, body)])


async def forty_refused_bodies(target: Target) -> None:
    """Forty concurrent bodies of 126 KB that are refused, in the queue that honest requests of 10 KB use."""
    body = _CHAT + b',"tools":[' + b"1," * 63_000 + b"1]}"
    await target.flood(40, [target.post(CHAT, body)])


async def lists_of_every_kind(target: Target) -> None:
    """Lists of wrong elements in the fields that may have a list or a map, on every route that reads JSON."""
    wrong = b"[" + b"0.5," * 30_000 + b"0.5]"
    names = b"{" + b",".join(b'"%d":"x"' % i for i in range(5_000)) + b"}"
    fields = {
        CHAT: ("messages", "tools", "documents", "functions", "modalities", "stop", "allowed_token_ids"),
        COMPLETIONS: ("prompt", "stop", "bad_words", "stop_token_ids", "guided_choice"),
        "/v1/responses": ("input", "tools", "include"),
        "/v1/messages": ("messages", "tools", "system", "stop_sequences"),
        "/v1/embeddings": ("input",),
        "/v1/score": ("text_1", "text_2"),
        "/v1/rerank": ("documents",),
        "/tokenize": ("messages", "tools"),
        "/detokenize": ("tokens",),
    }
    bodies = [
        (path, b'{"%s":%s}' % (field.encode(), wrong)) for path, some in fields.items() for field in some
    ]
    bodies += [(path, b'{"logit_bias":%s,"prompt":"a"}' % names) for path in (CHAT, COMPLETIONS)]
    choice = b'{"type":"allowed_tools","allowed_tools":{"mode":"auto","tools":%s}}' % wrong
    bodies.append((CHAT, _CHAT + b',"tool_choice":%s}' % choice))
    await target.flood(8, [target.post(path, body) for path, body in bodies])


ATTACKS = (
    duplicate_keys,
    duplicate_keys_4_mb,
    deep_nests,
    two_million_integers,
    empty_messages,
    long_texts,
    long_numbers,
    huge_biases,
    tools_of_ones,
    forty_refused_bodies,
    lists_of_every_kind,
)
