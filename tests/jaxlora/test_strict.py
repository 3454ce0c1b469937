"""Errors of settings with values of the wrong type are in the words of a run file."""

import pytest

from jaxlora.config.run_file import run_config
from jaxlora.errors import ConfigError

JOB = {"name": "a", "data": {"path": "x.jsonl"}}
A_LIST = "expected a list, such as [a, b]"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data": "x.jsonl"},
            "data: expected a mapping, such as {path: ...} (given: 'x.jsonl')",
        ),
        (
            {"data": None},
            "data: expected a mapping, such as {path: ...} (given: nothing)",
        ),
        (
            {"data": {"path": ["a", "b"]}},
            "data.path: expected one file, folder or hub id, not a list. List several "
            "in datasets, in place of path.",
        ),
        (
            {"data": {"path": "a", "weight": 0.5}},
            "data.weight: expected the field of the records that has their weights. A "
            "share of a data set is set by `mix: interleave` and probabilities beside "
            "datasets. (given: 0.5)",
        ),
        (
            {"data": {"path": "a", "text": ["b"]}},
            "data.text: expected one text, not a list",
        ),
        (
            {"data": {}},
            "data.path: give path: a file, a folder or a hub id. Or list several in "
            "datasets.",
        ),
        (
            {"target_modules": 3},
            "target_modules: expected text, in quotes if need be; or expected a list, "
            "such as [a, b] (given: 3)",
        ),
        (
            {"exclude_modules": ["a", 3]},
            "exclude_modules.1: expected text, in quotes if need be (given: 3)",
        ),
        ({"rank": None}, "rank: expected a whole number, such as 8 (given: nothing)"),
        ({"rank": 0}, "rank: must be greater than 0 (given: 0)"),
        (
            {"lr_schedule": "cosin"},
            "lr_schedule: must be 'constant', 'linear', 'cosine', "
            "'cosine_with_restarts', 'cosine_with_min_lr', "
            "'cosine_warmup_with_min_lr', 'polynomial', "
            "'inverse_sqrt' or 'warmup_stable_decay' (given: 'cosin')",
        ),
        ({"dropout": [0.1]}, "dropout: expected a number, such as 8 or 2e-4"),
        (
            {"rank_pattern": "q_proj"},
            "rank_pattern: expected a mapping, such as {name: value} (given: 'q_proj')",
        ),
    ],
)
def test_errors_of_types_are_in_words_of_yaml(settings, message):
    with pytest.raises(ConfigError) as caught:
        run_config({"model": "m", "jobs": [JOB | settings]})
    assert str(caught.value) == f"run: jobs.0.{message}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"jobs": JOB}, f"jobs: {A_LIST}"),
        ({"jobs": "a.yaml"}, f"jobs: {A_LIST} (given: 'a.yaml')"),
        ({"samples": {"prompts": "a"}}, f"samples.prompts: {A_LIST} (given: 'a')"),
        (
            {"samples": "a"},
            "samples: expected a mapping, such as {prompts: ...} (given: 'a')",
        ),
        ({"keep_bf16": "lm"}, f"keep_bf16: {A_LIST} (given: 'lm')"),
    ],
)
def test_errors_of_lists_are_in_words_of_yaml(settings, message):
    job = JOB | {"eval_fraction": 0.1}
    with pytest.raises(ConfigError) as caught:
        run_config({"model": "m", "jobs": [job], **settings})
    assert str(caught.value) == f"run: {message}"
