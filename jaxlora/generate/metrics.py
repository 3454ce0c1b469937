"""Metrics of generated answers, by which configurations of a sweep may be ranked.

A metric is a function of two lists of texts, the answers and what the records have in
their places, which returns a number. `exact_match` and `f1` are those of SQuAD
(arXiv 1606.05250, its evaluation script); ROUGE is that of the package rouge-score.
"""

import collections
import importlib
import importlib.util
import math
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from jaxlora.config.sweep_config import ROUGE, Metric
from jaxlora.errors import ConfigError

MetricFunction = Callable[[list[str], list[str]], float]

_ARTICLES = re.compile(r"\b(a|an|the)\b")


def exact_match(answers: Sequence[str], references: Sequence[str]) -> float:
    """Returns the share of answers that equal their references.

    Case, punctuation, articles and white space do not count.
    """
    pairs = zip(answers, references, strict=True)
    return _mean([float(_normal(a) == _normal(r)) for a, r in pairs])


def f1(answers: Sequence[str], references: Sequence[str]) -> float:
    """Returns the mean F1 of the words of answers, normalized as for `exact_match`."""
    pairs = zip(answers, references, strict=True)
    return _mean([_f1(_normal(a).split(), _normal(r).split()) for a, r in pairs])


def _f1(answer: list[str], reference: list[str]) -> float:
    if not (answer and reference):
        return float(answer == reference)
    common = (collections.Counter(answer) & collections.Counter(reference)).total()
    return 2 * common / (len(answer) + len(reference))


def _normal(text: str) -> str:
    """Returns a text in lower case, without punctuation, articles, and double space."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _rouge(name: str) -> MetricFunction:
    if importlib.util.find_spec("rouge_score") is None:
        raise ConfigError(
            f"sweep.metric: {name} needs the package rouge-score, which is not "
            "installed. Run: pip install 'jaxlora[rouge]'"
        )
    from rouge_score import rouge_scorer

    scorer = rouge_scorer.RougeScorer([name], use_stemmer=True)

    def score(answers: list[str], references: list[str]) -> float:
        pairs = zip(answers, references, strict=True)
        return _mean([scorer.score(r, a)[name].fmeasure for a, r in pairs])

    return score


def metric_function(name: str) -> MetricFunction:
    """Returns the function of a metric's name.

    Args:
        name: `exact_match`, `f1`, `rouge1`, `rouge2`, `rougeL`, or `module:function`.

    Raises:
        ConfigError: There is no such module or function, or a package is missing.
    """
    if name in ROUGE:
        return _rouge(name)
    if ":" not in name:
        return {"exact_match": exact_match, "f1": f1}[name]
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"sweep.metric: {name!r} cannot be imported ({error}). Start jaxlora where "
            "Python finds the module, as with PYTHONPATH=."
        ) from error
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(
            f"sweep.metric: {module!r} has no function {path!r}. Give module:function."
        )
    return found


def value_of(
    metric: Metric,
    function: MetricFunction,
    answers: list[str],
    references: list[str],
) -> float:
    """Returns the value of a metric.

    Raises:
        ConfigError: The function raises an error, or returns no finite number.
    """
    try:
        value = float(function(answers, references))
    except Exception as error:  # whatever the user's function raises
        raise ConfigError(
            f"sweep.metric: {metric.name} failed with {type(error).__name__}: {error}. "
            "It gets two lists of texts, the answers and the references."
        ) from error
    if not math.isfinite(value):
        raise ConfigError(
            f"sweep.metric: {metric.name} returned {value}, which cannot be ranked. "
            "Let it return a finite number."
        )
    return value
