"""Measures the memory of reading records, in a process of its own, on Linux.

    python -m tests.jaxlora.data.reading FOLDER

prints a JSON object with the bytes of each of `CASES`.
"""

import dataclasses
import json
import pathlib
import random
import string
import sys

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.tokenizer import Tokenizer
from jaxlora.data.tokens.token_cache import TokenCache
from jaxlora.data.tokens.tokenize import DataReader


@dataclasses.dataclass(frozen=True)
class Case:
    """Records of about so many characters, and how many jobs use them."""

    records: int
    chars: int
    max_length: int
    jobs: int = 1


CASES = {
    "many": Case(records=12_000, chars=30, max_length=1024, jobs=2),
    "documents": Case(records=200, chars=20_000, max_length=512),
}


def make_tokenizer(words: list[str]) -> Tokenizer:
    """Makes a byte-level BPE tokenizer for texts of these words."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["</s>"],
        show_progress=False,
    )
    backend.train_from_iterator([" ".join(words)] * 2, trainer)
    return Tokenizer(backend, {"eos_token": "</s>"})


def measure(case: Case, tokenizer: Tokenizer, words: list[str], folder: pathlib.Path):
    """Reads and tokenizes records that are not in the cache; returns bytes."""
    rng, path = random.Random(0), folder / f"{case.records}.jsonl"
    with path.open("w") as file:
        for _ in range(case.records):
            text = rng.choices(words, k=max(2, case.chars // 7))
            record = {"prompt": text[0], "completion": " " + " ".join(text[1:])}
            file.write(json.dumps(record) + "\n")
    reader = DataReader(tokenizer, TokenCache(folder / "tokens"))
    data = DataConfig(path=str(path))
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, _ = memory_bytes()
    read = [
        reader.read(LoraJob(name=f"job{i}", data=data, max_length=case.max_length))
        for i in range(case.jobs)
    ]
    # Samples that lie in a file take up memory once they are read.
    num_tokens = read[0].num_tokens
    assert read[0].num_target_tokens > 0
    kept, peak = memory_bytes()
    return {
        "num_samples": len(read[0].samples),
        "num_tokens": num_tokens,
        "peak_bytes": peak - before,
        "kept_bytes": kept - before,
    }


def memory_bytes() -> tuple[int, int]:
    """Returns this process's resident memory, and its peak since the last reset."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    kilobytes = {line.split(":")[0]: line.split()[1] for line in lines if "kB" in line}
    return 1024 * int(kilobytes["VmRSS"]), 1024 * int(kilobytes["VmHWM"])


def main() -> None:
    rng = random.Random(1)
    words = [
        "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9)))
        for _ in range(3000)
    ]
    folder, made = pathlib.Path(sys.argv[1]), make_tokenizer(words)
    found = {name: measure(case, made, words, folder) for name, case in CASES.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
