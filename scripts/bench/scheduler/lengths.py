"""Synthetic sequence lengths of the data sets that LoRAFusion is evaluated on.

The lengths are log-normal and clipped to [32, 4096] tokens, as in LoRAFusion's
artifact. The mean numbers of words in a document and its summary are the published ones
of XSum (431 + 23), CNN/DailyMail (781 + 56) and WikiSum (1334 + 101). The widths
(sigma) and the 1.17 tokens per word are assumptions.
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
SHAPES = ("uniform", "lognormal", "heavy")


def lengths(name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draws lengths in tokens.

    Args:
        name: A data set, or `mix` for a third of each. `uniform`, `lognormal` and
            `heavy` (Pareto) have about the mean of `mix`, with different tails.
        count: Number of lengths.
        rng: The random generator.
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
    """Makes the samples of one job per name; the last global batch may be smaller.

    Args:
        names: Source of each job's lengths, as for `lengths`.
        num_samples: Number of samples of each job.
        batch_size: Global batch size of each job.
        seed: Seeds the lengths, together with the number of the job.
    """
    counts = [num_samples] * len(names) if isinstance(num_samples, int) else num_samples
    sizes = [batch_size] * len(names) if isinstance(batch_size, int) else batch_size
    out = []
    for job, (name, count, size) in enumerate(zip(names, counts, sizes, strict=True)):
        drawn = lengths(name, count, np.random.default_rng([seed, job]))
        out += in_batches(job, drawn, size)
    return out


def in_batches(job: int, drawn: np.ndarray, size: int) -> list[Sample]:
    """Makes the samples of one job from their lengths, in global batches of `size`."""
    return [
        Sample(owner=job, batch=i // size, index=i % size, num_tokens=int(n))
        for i, n in enumerate(drawn)
    ]
