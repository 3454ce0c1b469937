"""Synthetic sequence lengths of the data sets that LoRAFusion measures with.

Log-normal, clipped to [32, 4096] tokens as in LoRAFusion's artifact, at 1.17 tokens a
word. Mean numbers of words of document and summary are the published ones of XSum
(431 + 23), CNN/DailyMail (781 + 56) and WikiSum (1334 + 101); the widths (sigma) and
the tokens a word are assumptions.
"""

from collections.abc import Sequence

import numpy as np

from jaxlora.scheduler import Sample

TOKENS_PER_WORD = 1.17
SHORTEST, LONGEST = 32, 4096
WORDS_AND_SIGMA = {
    "xsum": (431.07 + 23.26, 0.65),
    "cnn": (781.0 + 56.0, 0.49),
    "wikisum": (1334.0 + 101.0, 0.55),
}
DATA_SETS = (*WORDS_AND_SIGMA, "mix")
SHAPES = ("uniform", "lognormal", "heavy")


def lengths(name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` lengths in tokens.

    Args:
        name: A data set; `mix` is a third of each; `uniform`, `lognormal` and `heavy`
            (Pareto) have mix's mean, about, and other tails.
        count: How many.
        rng: Where they come from.
    """
    if name == "mix":
        parts = [lengths(n, -(-count // 3), rng) for n in WORDS_AND_SIGMA]
        return rng.permutation(np.concatenate(parts))[:count]
    if name == "uniform":
        drawn = rng.uniform(SHORTEST, 2100, count)
    elif name == "heavy":
        drawn = 350 * (1 + rng.pareto(1.4, count))
    elif name == "lognormal":
        drawn = rng.lognormal(np.log(1060) - 0.5**2 / 2, 0.5, count)
    else:
        words, sigma = WORDS_AND_SIGMA[name]
        mean = words * TOKENS_PER_WORD
        drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.rint(drawn), SHORTEST, LONGEST).astype(int)


def jobs(
    names: Sequence[str],
    *,
    num_samples: int | Sequence[int],
    batch_size: int | Sequence[int],
    seed: int = 0,
) -> list[Sample]:
    """Samples of one job a name; the last global batch may be smaller.

    Args:
        names: Where each job's lengths come from.
        num_samples: Of each job.
        batch_size: Global batch size of each job.
        seed: Together with a job's number, makes its lengths.
    """
    counts = [num_samples] * len(names) if isinstance(num_samples, int) else num_samples
    sizes = [batch_size] * len(names) if isinstance(batch_size, int) else batch_size
    out = []
    for job, (name, count, size) in enumerate(zip(names, counts, sizes, strict=True)):
        drawn = lengths(name, count, np.random.default_rng([seed, job]))
        out += in_batches(job, drawn, size)
    return out


def in_batches(job: int, drawn: np.ndarray, size: int) -> list[Sample]:
    """Samples of one job with these lengths, in global batches of `size`."""
    return [
        Sample(job=job, batch=i // size, index=i % size, num_tokens=int(n))
        for i, n in enumerate(drawn)
    ]
