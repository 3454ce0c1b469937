"""The share of padding that microbatches are packed by, and where it comes from."""

import dataclasses

import numpy as np
import pytest

from jaxlora import RunConfig
from jaxlora.costs.device_profile import Profile
from jaxlora.costs.gpus import find_speed
from jaxlora.errors import ConfigError
from jaxlora.plan.lanes import window_cost
from jaxlora.plan.memory.bounds import Bounds
from jaxlora.plan.mesh.machine import Machine
from jaxlora.plan.resolve import _padding_share
from jaxlora.plan.run_plan import RunPlan
from tests.jaxlora.plan.made_up import search_of
from tests.llama import LLAMA_8B, decoder

CAPACITY = 4096


def plan_of(mesh: str, *, implementation="mosaic", **settings) -> RunPlan:
    job = {"name": "a", "data": {"path": "a.jsonl"}}
    given = {"mesh": mesh, "microbatch_tokens": CAPACITY} | settings
    config = RunConfig(model="m", jobs=[job], **given)
    spec = decoder(LLAMA_8B, implementation=implementation)
    machine = Machine(num_devices=2, speed=find_speed("NVIDIA H200"), memory=None)
    bounds = Bounds(smallest=1024, largest=8192, unit=256, fixed=CAPACITY)
    return search_of(config, spec, bounds, machine).laid_out(config)


def decided(asked, plan: RunPlan) -> tuple[float, str]:
    share, notes = _padding_share(asked, plan)
    return share, " ".join(note.text for note in notes)


def test_it_is_that_of_the_kernels_unless_it_was_measured():
    share, text = decided("auto", plan_of("stage=2"))
    assert share == 0.16
    assert "took 0.16 of a token's time, as is usual of mosaic" in text
    share, text = decided("auto", plan_of("stage=2", implementation="xla"))
    assert share == 1 and "xla kernels do not skip padding" in text
    plan = plan_of("stage=2")
    for measured, share in ((0.24, 0.24), (0.0, 0.01)):  # 0 is not a setting
        profile = Profile.model_construct(padding=measured)
        rates = dataclasses.replace(plan.rates, profile=profile)
        found = decided("auto", dataclasses.replace(plan, rates=rates))
        assert found[0] == share and "`jaxlora profile` measured" in found[1]


def test_a_run_may_set_it():
    share, text = decided(0.5, plan_of("stage=2"))
    assert share == 0.5 and text.endswith("as the run has it")
    assert decided(1.0, plan_of("stage=2"))[0] == 1


def test_it_changes_nothing_with_one_stage():
    assert decided("auto", plan_of("data=2")) == (1.0, "")
    share, text = decided(0.5, plan_of("data=2"))
    assert share == 0.5 and "changes nothing, as the mesh has one stage" in text
    assert plan_of("data=2", padding_share=0.5).cost == plan_of("data=2").cost


@pytest.mark.parametrize("wrong", [0, -0.1, 1.5, "some", True])
def test_other_values_are_refused(wrong):
    with pytest.raises(ConfigError, match="padding_share"):
        plan_of("stage=2", padding_share=wrong)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_microbatch_without_padding_takes_as_long_with_any_share(share):
    cost = window_cost(plan_of("stage=2", padding_share=share).config, LLAMA_8B)
    assert cost.is_flat == (share == 1)
    tokens = np.array([CAPACITY, 1024])
    shapes = tokens if not cost.buckets else np.array([CAPACITY] * 2)
    forward, backward = cost.times(shapes, np.zeros(2), np.ones(2))
    whole, quarter = (forward + backward).sum(axis=0)
    assert whole == pytest.approx(CAPACITY)  # in tokens of the whole model
    assert quarter == pytest.approx(1024 + share * (CAPACITY - 1024))
    auto = window_cost(plan_of("stage=2").config, LLAMA_8B)
    assert share < 1 or cost == auto


def test_several_shapes_have_padding_of_their_own():
    plan = plan_of("stage=2", padding_share=0.25, microbatch_shapes=(1024,))
    cost = window_cost(plan.config, LLAMA_8B, (1024,))
    assert cost.buckets == (1024, CAPACITY) and cost.padding == 0.25
