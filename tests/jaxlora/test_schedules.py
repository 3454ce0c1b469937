"""Learning rates are those of transformers' schedulers."""

import json
import pathlib

import numpy as np
import pytest

from jaxlora import LoraJob
from jaxlora.config import DataConfig
from jaxlora.config.schedules import SCHEDULES, learning_rate
from jaxlora.errors import ConfigError

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "schedules.json"
FOUND = json.loads(GOLDEN.read_text())


def job(**settings) -> LoraJob:
    return LoraJob(name="a", data=DataConfig(path="x"), **settings)


def test_all_schedules_are_compared():
    assert {case["lr_schedule"] for case in FOUND["cases"]} == SCHEDULES.keys()


def test_a_constant_rate_has_warm_up():
    assert job(lr_scheduler_type="constant_with_warmup") == job(lr_schedule="constant")


def test_a_share_of_the_steps_as_warm_up_is_rounded_up():
    """As transformers does."""
    one = job(learning_rate=1.0, lr_schedule="constant", warmup_ratio=0.1)
    rates = [learning_rate(one, step, 15) for step in range(4)]
    assert rates == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    "case", FOUND["cases"], ids=lambda c: f"{c['lr_schedule']}-{c['warmup_steps']}"
)
def test_rates_are_those_of_transformers(case):
    one = job(
        learning_rate=FOUND["learning_rate"],
        lr_scheduler_type=case["lr_schedule"],
        lr_scheduler_kwargs=case["lr_schedule_args"],
        warmup_steps=case["warmup_steps"],
    )
    rates = [learning_rate(one, step, case["steps"]) for step in range(case["steps"])]
    np.testing.assert_allclose(
        rates, case["rates"], rtol=1e-7, atol=1e-12 * FOUND["learning_rate"]
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lr_schedule": "linear", "lr_schedule_args": {"num_cycles": 2}},
            "'num_cycles' is not a setting of the schedule linear, whose",
        ),
        (
            {"lr_schedule": "cosine_with_min_lr"},
            "give min_lr, the lowest rate, or min_lr_rate",
        ),
        (
            {
                "lr_schedule": "cosine_with_min_lr",
                "lr_schedule_args": {"min_lr": 1e-5, "min_lr_rate": 0.1},
            },
            "give min_lr, the lowest rate, or min_lr_rate",
        ),
        ({"lr_schedule": "warmup_stable_decay"}, "give num_decay_steps"),
        (
            {
                "lr_schedule": "warmup_stable_decay",
                "lr_schedule_args": {"num_decay_steps": 3, "decay_type": "square"},
            },
            "decay_type='square' must be one of linear, cosine, 1-sqrt",
        ),
        (
            {"lr_schedule": "polynomial", "lr_schedule_args": {"power": "2"}},
            "power='2' must be a number",
        ),
        (
            {"lr_schedule": "polynomial", "lr_schedule_args": {"power": -1}},
            "power=-1 must be at least 0",
        ),
        (
            {"lr_schedule": "polynomial", "learning_rate": 1e-8},
            "lr_end=1e-07 must be below learning_rate=1e-08",
        ),
    ],
)
def test_settings_that_a_schedule_does_not_have(settings, message):
    with pytest.raises(ConfigError) as caught:
        job(**settings)
    assert message in str(caught.value)
