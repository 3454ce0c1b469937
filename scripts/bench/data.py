"""Measures the speed and memory of turning records into samples, on Linux.

Prints one line of figures for a cold start, and one for a start that takes the tokens
from the cache on disk. Needs no GPU.

    jaxlora bench data --records 2000000
    jaxlora bench data --records 20000 --chars 500 --jobs 8
    jaxlora bench data --records 1000 --chars 20000
    jaxlora bench data --records 1 --chars 40000000
"""

import argparse
import dataclasses
import json
import logging
import pathlib
import random
import string
import tempfile
import time
from collections.abc import Iterator, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxlora.bench.options import make_parser
from jaxlora.config import DataConfig, LoraJob
from jaxlora.data.token_cache import TokenCache
from jaxlora.data.tokenize import DataReader
from jaxlora.data.tokenizer import Tokenizer

_WORDS = 3000
_CHARS_PER_WORD = 6


def make_tokenizer(words: Sequence[str]) -> Tokenizer:
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


def write_records(
    path: pathlib.Path, num_records: int, num_chars: int, words: Sequence[str]
) -> None:
    """Writes prompts and completions of about `num_chars` characters together."""
    rng = random.Random(0)
    count = max(2, num_chars // (_CHARS_PER_WORD + 1))
    with path.open("w") as file:
        for _ in range(num_records):
            text = rng.choices(words, k=count)
            record = {"prompt": text[0], "completion": " " + " ".join(text[1:])}
            file.write(json.dumps(record) + "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Time and memory for the records of all jobs.

    Attributes:
        num_samples: Number of samples.
        num_tokens: Number of tokens.
        seconds: Wall time from the file to samples.
        cpu_seconds: CPU time, summed over all processors.
        peak_bytes: Peak memory, above the memory before.
        kept_bytes: Memory afterwards, above the memory before.
    """

    num_samples: int
    num_tokens: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    kept_bytes: int

    def __str__(self) -> str:
        per_sample = 1e6 / self.num_samples
        overhead = self.kept_bytes - 4 * self.num_tokens
        return (
            f"{self.num_samples:,} samples of {self.num_tokens / self.num_samples:.1f} "
            f"tokens in {self.seconds:.1f} s: {self.seconds * per_sample:.1f} us per "
            f"sample ({self.cpu_seconds * per_sample:.1f} us of CPU time); memory "
            f"+{self.peak_bytes / 2**20:.0f} MiB at its peak, "
            f"+{self.kept_bytes / 2**20:.0f} MiB kept, which is "
            f"{overhead / self.num_samples:.0f} bytes per sample beyond its tokens"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What to measure.

    Attributes:
        records: Number of records.
        chars: Number of characters of a record, roughly.
        max_length: Largest number of tokens of a sample.
        jobs: Number of jobs that use the records.
    """

    records: int
    chars: int
    max_length: int
    jobs: int


def measure(case: Case) -> Iterator[Measured]:
    """Reads and tokenizes records: first without a cache, then from the cache."""
    rng = random.Random(1)
    words = [
        "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9)))
        for _ in range(_WORDS)
    ]
    tokenizer = make_tokenizer(words)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "records.jsonl"
        write_records(path, case.records, case.chars, words)
        cache = TokenCache(pathlib.Path(folder) / "tokens")
        for _ in ("cold", "warm"):
            yield _measure(DataReader(tokenizer, cache), str(path), case)


def _measure(reader: DataReader, path: str, case: Case) -> Measured:
    config = DataConfig(path=path)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    memory, _ = _memory_bytes()
    began, cpu_began = time.perf_counter(), time.process_time()
    job = LoraJob(name="job", data=config, max_length=case.max_length)
    data = reader.read(job)
    for number in range(1, case.jobs):
        reader.read(job.replace(name=f"job{number}"))
    seconds = time.perf_counter() - began
    cpu_seconds = time.process_time() - cpu_began
    # Samples that lie in a file take up memory once they are read.
    num_tokens = data.num_tokens
    assert data.num_target_tokens > 0
    kept, peak = _memory_bytes()
    return Measured(
        num_samples=len(data.samples),
        num_tokens=num_tokens,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        peak_bytes=peak - memory,
        kept_bytes=kept - memory,
    )


def _memory_bytes() -> tuple[int, int]:
    """Returns this process's resident memory, and its peak since the last reset."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    kilobytes = {line.split(":")[0]: line.split()[1] for line in lines if "kB" in line}
    return 1024 * int(kilobytes["VmRSS"]), 1024 * int(kilobytes["VmHWM"])


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the options."""
    out = make_parser("data", __doc__)
    out.add_argument("--records", type=int, default=200_000)
    out.add_argument("--chars", type=int, default=60, help="characters of a record")
    out.add_argument("--max-length", type=int, default=1024, help="tokens of a sample")
    out.add_argument("--jobs", type=int, default=1, help="jobs that use the records")
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark with the given options."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    case = Case(
        records=args.records,
        chars=args.chars,
        max_length=args.max_length,
        jobs=args.jobs,
    )
    for start, measured in zip(("cold", "warm"), measure(case), strict=True):
        print(f"{start}: {measured}")
