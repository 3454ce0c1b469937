"""Which kernels and which attention are chosen, and what is said about it."""

import dataclasses
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest

from jaxlora.data.pack import split_by_segment_limit
from jaxlora.errors import ConfigError
from jaxlora.models.registry import model_config
from jaxlora.modules.attention_table import ATTENTIONS
from jaxlora.modules.length_classes import shortest_class
from jaxlora.pallas_kernels import BACKENDS
from jaxlora.pallas_kernels.triton.target import forced_capability
from jaxlora.plan.job.kernel_choice import (
    Choice,
    choose_attention,
    choose_kernels,
    choose_wide_attention,
    describe_choices,
    describe_device,
)
from jaxlora.scheduler import Sample
from tests import tiny
from tests.jaxlora.train.runs import plan_and_jobs, run_of, tiny_spec

MODEL = model_config(tiny.CONFIG)


@pytest.fixture
def cudnn(monkeypatch):
    """Sets why cuDNN cannot run a model."""

    def set_to(reason) -> None:
        entry = ATTENTIONS["cudnn"]
        changed = dataclasses.replace(entry, unsupported=lambda dtype, model: reason)
        monkeypatch.setitem(ATTENTIONS, "cudnn", changed)

    return set_to


def choose(asked: str) -> str:
    return str(choose_attention(asked, jnp.bfloat16, MODEL))


def test_auto_takes_the_first_that_can_run(cudnn):
    cudnn(None)
    assert choose("auto") == "cudnn"
    assert choose("cudnn") == "cudnn, as requested"
    assert choose("xla") == "xla, as requested"


def test_elsewhere_auto_says_why_not(cudnn):
    cudnn("it is a toaster")
    chosen = choose_attention("auto", jnp.bfloat16, MODEL)
    assert chosen.passed_over["cudnn"] == "cannot run this: it is a toaster"
    with pytest.raises(ConfigError, match=r"toaster\. Use auto, or another attention"):
        choose("cudnn")


def test_where_cudnn_cannot_run_auto_takes_triton(cudnn):
    cudnn("it is a toaster")
    with forced_capability(89, num_sms=142):
        chosen = choose_attention("auto", jnp.bfloat16, MODEL)
        assert (chosen.name, *chosen.passed_over) == ("triton", "cudnn")
        assert choose("triton") == "triton, as requested"


def test_auto_passes_over_kernels_that_are_slow_on_the_device(monkeypatch):
    """They still run where they are asked for."""
    spec = tiny_spec(["layers.0.mlp.up_proj"])
    entry = dataclasses.replace(
        BACKENDS["triton"],
        unsupported=lambda shape: None,
        slow_device=lambda: "it is a kettle",
    )
    monkeypatch.setitem(BACKENDS, "triton", entry)
    chosen = choose_kernels("auto", spec, 64)
    assert chosen.name == "xla"
    assert chosen.passed_over["triton"] == "is slow here: it is a kettle"
    assert str(choose_kernels("triton", spec, 64)) == "triton, as requested"


def test_kernels_must_run_experts_that_no_job_adapts(monkeypatch):
    config = pathlib.Path(__file__).parents[2] / "golden/models/qwen3_moe/config.json"
    model = model_config(json.loads(config.read_text()))
    spec = dataclasses.replace(tiny_spec(["layers.0.self_attn.q_proj"]), config=model)
    entry = dataclasses.replace(
        BACKENDS["triton"],
        unsupported=lambda shape: "it is narrow" if shape.in_features < 32 else None,
    )
    monkeypatch.setitem(BACKENDS, "triton", entry)
    assert choose_kernels("auto", spec, 64).name == "xla"
    with pytest.raises(ConfigError, match="it is narrow"):
        choose_kernels("triton", spec, 64)


@pytest.mark.parametrize("attention", ["xla", "cudnn"])
def test_the_plan_knows_the_room_of_cudnn(cudnn, model, jobs, tmp_path, attention):
    """The executor never splits a microbatch of the plan's limits."""
    cudnn(None)
    config = run_of(
        model,
        tmp_path / "run",
        jobs[:2],
        microbatch_tokens=512,
        attention=attention,
        dtype="float32",
    )
    plan, _ = plan_and_jobs(config, model)
    limits, options = plan.rules.limits, plan.spec.options
    if attention == "xla":
        assert limits == config.limits
        return
    short = shortest_class(512, *options.lengths)
    assert limits == dataclasses.replace(config.limits, max_samples=short.segments)
    samples = tuple(
        Sample(owner=0, batch=0, index=i, num_tokens=1) for i in range(short.segments)
    )
    assert split_by_segment_limit(samples, short.tokens, short.segments) == [samples]


def test_nothing_that_runs_is_an_error(monkeypatch):
    for name, entry in ATTENTIONS.items():
        changed = dataclasses.replace(entry, unsupported=lambda dtype, model: "no")
        monkeypatch.setitem(ATTENTIONS, name, changed)
    with pytest.raises(
        ConfigError, match="nothing that runs: cudnn, triton and xla cannot run"
    ):
        choose("auto")


def test_a_soft_cap_reaches_the_reason(monkeypatch):
    capped = dataclasses.replace(MODEL, score_softcap=50.0)
    monkeypatch.setitem(
        ATTENTIONS,
        "cudnn",
        dataclasses.replace(
            ATTENTIONS["cudnn"],
            unsupported=lambda dtype, model: f"cap {model.score_softcap:g}",
        ),
    )
    with pytest.raises(ConfigError, match=r"cap 50\."):
        choose_attention("cudnn", jnp.bfloat16, capped)


def test_wider_heads_of_some_layers_have_an_attention_of_their_own(monkeypatch):
    """Nothing runs in another way than the line says."""
    more = {"hidden_size_per_layer_input": 0, "num_hidden_layers": 6, "head_dim": 256}
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    sizes = {key: tiny.CONFIG[key] for key in kept}
    model = model_config({"model_type": "gemma4_text", **sizes, **more})
    most = lambda dtype, model: None if model.head_dim <= 256 else "heads are wide"
    entry = dataclasses.replace(ATTENTIONS["cudnn"], unsupported=most)
    monkeypatch.setitem(ATTENTIONS, "cudnn", entry)
    attention = choose_attention("auto", jnp.bfloat16, model)
    wide = choose_wide_attention("auto", jnp.bfloat16, model)
    assert wide is not None and (attention.name, wide[0]) == ("cudnn", 512)
    assert wide[1].name == "xla" and "wide" in wide[1].passed_over["cudnn"]
    said = describe_choices(Choice(name="toy"), attention, wide)
    assert "attention: cudnn; attention of heads of 512 features: xla; cudnn ca" in said
    with forced_capability(89, num_sms=142):
        wide = choose_wide_attention("cudnn", jnp.bfloat16, model)
        assert wide is not None and str(wide[1]) == "triton"
        less = dataclasses.replace(model, head_dim=128, full_head_dim=256)
        wide = choose_wide_attention("triton", jnp.bfloat16, less)  # both can run them
        assert wide is not None and str(wide[1]) == "triton, as requested"
        less = dataclasses.replace(model, full_head_dim=100)  # which are narrower
        wide = choose_wide_attention("triton", jnp.bfloat16, less)
        assert wide is not None and (wide[0], wide[1].name) == (100, "cudnn")
    wide = choose_wide_attention("xla", jnp.bfloat16, model)
    assert wide is not None and wide[1].is_requested
    assert choose_wide_attention("auto", jnp.bfloat16, MODEL) is None


TOASTER = "cannot run this: it is a toaster"


@pytest.mark.parametrize(
    ("kernels", "attention", "said"),
    [
        (
            Choice(name="toy", passed_over={"mosaic": TOASTER}),
            Choice(name="xla", is_requested=True),
            f"toy; attention: xla, as requested; mosaic {TOASTER}",
        ),
        (
            Choice(name="xla", passed_over={"mosaic": TOASTER, "triton": TOASTER}),
            Choice(name="xla", passed_over={"cudnn": TOASTER, "triton": TOASTER}),
            f"xla; attention: xla; mosaic, triton and cudnn {TOASTER}",
        ),
        (
            Choice(name="xla", passed_over={"mosaic": TOASTER, "triton": "is slow"}),
            Choice(name="mask", passed_over={"cudnn": TOASTER}),
            f"xla; attention: mask; mosaic and cudnn {TOASTER}; triton is slow",
        ),
        (Choice(name="mosaic"), Choice(name="cudnn"), "mosaic; attention: cudnn"),
    ],
)
def test_one_line_says_what_runs_where_and_each_reason_once(kernels, attention, said):
    choices = describe_choices(kernels, attention)
    assert choices == f"device: {describe_device()}; LoRA kernels: {said}"


@pytest.mark.parametrize(
    ("platform", "capability", "text"),
    [
        ("cpu", None, "Some device"),
        ("gpu", "8.9", "Some device (compute capability 8.9)"),
        ("gpu", "9.0", "Some device (compute capability 9.0)"),
        (
            "gpu",
            "12.0",
            "Some device (compute capability 12.0, Blackwell, untested)",
        ),
    ],
)
def test_devices_are_described(monkeypatch, platform, capability, text):
    device = types.SimpleNamespace(
        platform=platform, device_kind="Some device", compute_capability=capability
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert describe_device() == text
