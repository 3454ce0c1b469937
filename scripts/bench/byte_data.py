"""A byte-level tokenizer and small random records, which need no download."""

import json
import pathlib

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")


def write_tokenizer(folder: pathlib.Path) -> None:
    """Writes a tokenizer with three special tokens and a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(t) for t in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_records(path: pathlib.Path, count: int, seed: int, longest: int = 60) -> str:
    """Writes JSONL of ragged prompts whose completions repeat them in part.

    Args:
        path: File to write.
        count: Number of records.
        seed: Makes the prompts.
        longest: Prompts are shorter than this, in characters.

    Returns:
        The path as text.
    """
    rng = np.random.default_rng(seed)
    letters = np.array(list("abcdefgh "))
    with path.open("w") as file:
        for _ in range(count):
            prompt = "".join(rng.choice(letters, rng.integers(3, longest)))
            completion = prompt[: rng.integers(2, len(prompt) + 1)].upper()
            record = {"prompt": prompt, "completion": completion}
            file.write(json.dumps(record) + "\n")
    return str(path)
