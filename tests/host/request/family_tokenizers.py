"""Small tokenizers of each model family's kind, trained on a few lines of text."""

import json
from collections.abc import Callable, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "In the beginning God created the heaven and the earth. It's 2,024 o'clock!",
    "naïve café — “quoted” … 中文字符 和 日本語 テキスト",
    "emoji 👩‍👩‍👧‍👦 🇮🇸 é combining",
    "\tdef f(x):\n\t\treturn x  # tabs and   spaces\r\n\n\n",
]
SPACE = "\u2581"  # how SentencePiece writes a space
_GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_BLOOM_SPLIT = r" ?[^(\s|[.,!?…。，、।۔،])]+"


def id_of(tokenizer: tokenizers.Tokenizer, name: str) -> int:
    token_id = tokenizer.token_to_id(name)
    assert token_id is not None, name
    return token_id


def _byte_level(
    pre_tokenizer: Sequence[pre_tokenizers.PreTokenizer],
    *,
    special: Sequence[str],
    normalizer: normalizers.Normalizer | None = None,
    bos: str | None = None,
    added: Sequence[AddedToken] = (),
) -> tokenizers.Tokenizer:
    """Byte-level BPE; `bos` is put before every text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=[*special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([*added])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if bos is not None:
        template = _template(bos, id_of(tokenizer, bos))
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def _template(bos: str, token_id: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, token_id)])


def _sentencepiece(
    *,
    normalizer: normalizers.Normalizer | None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
    special: Sequence[str],
    added: Sequence[AddedToken] = (),
    strips: bool,
) -> tokenizers.Tokenizer:
    """BPE with a token for each byte that no other token has; the second special token begins every text."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE)
    trainer = trainers.BpeTrainer(vocab_size=160, show_progress=False, max_token_length=8)
    trained.train_from_iterator(CORPUS[:1] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    names = [*special, *[f"<0x{byte:02X}>" for byte in range(256)], *model["vocab"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token=special[0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    strip = [decoders.Strip(content=" ", left=1, right=0)] if strips else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens([*special])
    tokenizer.add_tokens([*added])
    tokenizer.post_processor = _template(special[1], 1)
    return tokenizer


def _prepend() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])


def _special(*names: str, **options: bool) -> list[AddedToken]:
    return [AddedToken(name, special=True, **options) for name in names]


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _bytes(*, use_regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _llama3() -> tokenizers.Tokenizer:
    return _byte_level(
        [_split(_GPT4_SPLIT), _bytes(use_regex=False)],
        special=["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
        bos="<|begin_of_text|>",
    )


def _gemma() -> tokenizers.Tokenizer:
    return _sentencepiece(
        normalizer=normalizers.Replace(" ", SPACE),
        pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
        special=["<pad>", "<bos>", "<eos>", "<unk>"],
        added=[
            *_special("<start_of_turn>", "<end_of_turn>"),
            *[AddedToken("\n" * n, normalized=False) for n in range(2, 5)],
        ],
        strips=False,
    )


def _phi3() -> tokenizers.Tokenizer:
    return _sentencepiece(
        normalizer=_prepend(),
        special=["<unk>", "<s>", "</s>"],
        added=_special("<|endoftext|>", "<|assistant|>", "<|end|>", rstrip=True, normalized=False),
        strips=True,
    )


def _llama2(*, metaspace: bool = False) -> tokenizers.Tokenizer:
    """Llama 2's file as it was published, or with `metaspace` as newer versions of transformers write it."""
    return _sentencepiece(
        normalizer=None if metaspace else _prepend(),
        pre_tokenizer=pre_tokenizers.Metaspace(SPACE, "first", split=False) if metaspace else None,
        special=["<unk>", "<s>", "</s>"],
        strips=True,
    )


def _t5() -> tokenizers.Tokenizer:
    """A Unigram model with the Metaspace decoder."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always")
    tokenizer.decoder = decoders.Metaspace(SPACE, "always")
    trainer = trainers.UnigramTrainer(
        vocab_size=150, show_progress=False, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken(f"two {SPACE}words")])
    return tokenizer


_NFC = normalizers.NFC
END = "<|endoftext|>"


def _bert() -> tokenizers.Tokenizer:
    """WordPiece of lower-case words; [CLS] begins a text and [SEP] ends it."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, show_progress=False, special_tokens=names)
    more = ["it's, I've, do not. they're? n't! isn't", "' ' , . ? !", "do not ' do not"]
    tokenizer.train_from_iterator([*CORPUS, *more] * 3, trainer)
    ends = [(name, id_of(tokenizer, name)) for name in names[2:]]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer


FAMILIES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bert": _bert,
    "llama 1 and 2": _llama2,
    "llama 2, saved again": lambda: _llama2(metaspace=True),
    "llama 3": _llama3,
    "mistral": lambda: _sentencepiece(
        normalizer=_prepend(),
        special=["<unk>", "<s>", "</s>"],
        added=_special("[INST]", "[/INST]", "[TOOL_CALLS]"),
        strips=True,
    ),
    "qwen": lambda: _byte_level(
        [_split(_GPT4_SPLIT.replace("{1,3}", "")), _bytes(use_regex=False)],
        special=[END, "<|im_start|>", "<|im_end|>"],
        normalizer=_NFC(),
        added=[AddedToken("<tool_call>"), AddedToken("<think>")],
    ),
    "gemma": _gemma,
    "phi3": _phi3,
    "granite": lambda: _byte_level([_bytes()], special=["<|end_of_text|>", "<|start_of_role|>"]),
    "olmo2": lambda: _byte_level([_split(_GPT4_SPLIT), _bytes(use_regex=False)], special=[END, "<|pad|>"]),
    "starcoder2": lambda: _byte_level(
        [pre_tokenizers.Digits(individual_digits=True), _bytes()],
        special=[END, "<fim_prefix>", "<repo_name>"],
    ),
    "gpt_neox": lambda: _byte_level(
        [_bytes()],
        special=[END, "<|padding|>"],
        normalizer=_NFC(),
        added=[AddedToken(" " * n, normalized=True) for n in range(2, 6)],
    ),
    "gptj": lambda: _byte_level(
        [_bytes()], special=[END], added=[AddedToken(f"<|extratoken_{n}|>", normalized=True) for n in (1, 2)]
    ),
    "falcon": lambda: _byte_level(
        [
            pre_tokenizers.Punctuation("contiguous"),
            _bytes(),
            pre_tokenizers.Digits(individual_digits=False),
            _split("[0-9][0-9][0-9]"),
        ],
        special=[">>TITLE<<", END],
    ),
    "bloom": lambda: _byte_level(
        [_split(_BLOOM_SPLIT), _bytes(use_regex=False)], special=["<unk>", "<s>", "</s>", "<pad>"]
    ),
    "t5": _t5,
}
