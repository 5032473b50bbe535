"""The text of the demo model: two public-domain English Bibles, their train/held-out split, and the
tokenizer.

A text file here has documents (chapters) separated by blank lines; a document's first line is its heading,
and every further line a paragraph.
"""

from __future__ import annotations

import collections
import html
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 0
END_OF_TEXT = "<|endoftext|>"
HELD_OUT_SHARE = 0.02
EXCERPT_BYTES = 30_000

Chapter = tuple[str, int]  # (book, chapter number)
Verses = dict[Chapter, dict[int, str]]

DROPPED = re.compile(r"<(note|speaker)\b.*?</\1>|<title(?![^>]*canonical)[^>]*>.*?</title>", re.DOTALL)
BREAK = re.compile(r'<(?:div|lg)\b(?=[^>]*[se]ID=)(?![^>]*"x-milestone")[^>]*>|</?title[^>]*>')
QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "\xa0": " "})


def command_output(*command: str) -> str:
    """The standard output of a command; says which packages to install if the command is missing."""
    if shutil.which(command[0]) is None:
        packages = "bible-kjv bible-kjv-text sword-text-web libsword-utils"
        raise SystemExit(f"{command[0]!r} not found; on Debian: apt-get install {packages}")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def verses_of_web() -> Verses:
    """The World English Bible, verse by verse, from OSIS markup; a newline marks a paragraph break."""
    verses: Verses = collections.defaultdict(dict)
    for entry in command_output("mod2imp", "engWEB2015eb").split("$$$")[1:]:
        reference, _, markup = entry.partition("\n")
        match = re.fullmatch(r"(.+) (\d+):(\d+)", reference)
        if match is None or int(match[2]) == 0 or int(match[3]) == 0:
            continue  # prefaces and headings
        text = BREAK.sub("\n", DROPPED.sub(" ", markup.replace("\n", " ")))
        text = re.sub(r"<(l|lb|item)\b[^>]*>", " ", text)  # a line of verse or of a list runs on
        text = html.unescape(re.sub(r"<[^>]+>", "", text))
        text = re.sub(r"\s+([,.;:?!’”)])", r"\1", text)
        verses[match[1], int(match[2])][int(match[3])] = text.translate(QUOTES)
    return verses


def verses_of_kjv(books: list[str]) -> Verses:
    """The King James Version, verse by verse; `books` are the names of its 66 books in order."""
    verses: Verses = collections.defaultdict(dict)
    names: dict[str, str] = {}
    for line in command_output("bible", "-f", "gen1:1-rev22:21").splitlines():
        match = re.match(r"(\w*?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        if match is not None:
            book = names.setdefault(match[1], books[min(len(names), len(books) - 1)])
            verses[book, int(match[2])][int(match[3])] = match[4]
    if len(names) != len(books):
        raise SystemExit(f"expected {len(books)} books from `bible`, found {len(names)}")
    return verses


def heading(chapter: Chapter) -> str:
    """`I Samuel` 3 becomes `1 Samuel 3`, `Psalms` 3 becomes `Psalm 3`."""
    book = re.sub(r"^(I+V?) ", lambda m: {"I": "1", "II": "2", "III": "3", "IV": "4"}[m[1]] + " ", chapter[0])
    return f"{ {'Psalms': 'Psalm', 'Revelation of John': 'Revelation'}.get(book, book) } {chapter[1]}"


def document(chapter: Chapter, text: str) -> str:
    """Heading and paragraphs of one chapter, without blank lines and with single spaces."""
    paragraphs = (" ".join(line.split()).replace("— ", "—") for line in text.split("\n"))
    return "\n".join([heading(chapter), *filter(None, paragraphs)])


def with_paragraphs(verses: dict[int, str], model: dict[int, str]) -> str:
    """Break a chapter that has no paragraphs where `model`, the same chapter in the other text, breaks."""
    text, ended = "", False
    for number, verse in verses.items():
        like = model.get(number, "")
        starts = "\n" in like[: len(like) - len(like.lstrip())]
        text += ("\n" if ended or starts else " ") + verse
        ended = "\n" in like[len(like.rstrip()) :]
    return text


def build_corpus(work: Path) -> None:
    """Write `train.txt` and `held_out.txt`; a held-out chapter is held out in both translations."""
    web = verses_of_web()
    order = list(dict.fromkeys(book for book, _ in web))
    first, last = order.index("Tobit"), order.index("Matthew")
    kjv = verses_of_kjv(order[:first] + order[last:])
    documents: dict[Chapter, list[str]] = collections.defaultdict(list)
    for chapter, verses in web.items():
        documents[chapter].append(document(chapter, " ".join(verses.values())))
    for chapter, verses in kjv.items():
        documents[chapter].append(document(chapter, with_paragraphs(verses, web.get(chapter, {}))))
    chapters = sorted(documents)
    np.random.default_rng(SEED).shuffle(chapters)
    chapters = [(str(book), int(number)) for book, number in chapters]
    n_held_out = round(HELD_OUT_SHARE * len(chapters))
    work.mkdir(parents=True, exist_ok=True)
    for name, part in (("held_out", chapters[:n_held_out]), ("train", chapters[n_held_out:])):
        texts = [text for chapter in part for text in documents[chapter]]
        (work / f"{name}.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
        print(f"{name}: {len(part)} chapters, {len(texts)} documents, {sum(map(len, texts)):,} characters")


def excerpt(held_out: str) -> str:
    """The first whole documents of the held-out text, together about `EXCERPT_BYTES`."""
    texts, size = [], 0
    for text in held_out.strip().split("\n\n"):
        if size + len(text.encode()) <= EXCERPT_BYTES:
            texts.append(text)
            size += len(text.encode()) + 2
    return "\n\n".join(texts) + "\n"


def build_tokenizer(work: Path, vocab_size: int) -> None:
    """Train the byte-level BPE on `train.txt` only and write `tokenizer.json`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = (work / "train.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.save(str(work / "tokenizer.json"))
    n_tokens = sum(map(len, encode(work, "train.txt")))
    n_bytes = len(text.encode())
    print(f"{tokenizer.get_vocab_size()} entries, {n_tokens:,} tokens, {n_bytes / n_tokens:.2f} bytes each")


def encode(work: Path, name: str) -> list[list[int]]:
    """The documents of a text file as token ids, each with the end-of-text token before and after it."""
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    return encode_text(tokenizer, (work / name).read_text(encoding="utf-8"))


def encode_text(tokenizer: Tokenizer, text: str) -> list[list[int]]:
    """`encode` for a text in memory."""
    end = end_of_text(tokenizer)
    encodings = tokenizer.encode_batch(text.strip().split("\n\n"))
    return [[end, *encoding.ids, end] for encoding in encodings]


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id of the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None, "every tokenizer made here has it"
    return end
