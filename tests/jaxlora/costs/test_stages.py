"""The estimated time of the parts of a decoder, and its division into stages."""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest

from jaxlora.costs.gpus import UNKNOWN_DEVICE, find_speed
from jaxlora.costs.stages import decoder_seconds, stage_borders, stage_seconds
from jaxlora.costs.work import Work, head_work, layer_work, microbatch_work
from jaxlora.errors import ConfigError
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.options import DecoderOptions
from jaxlora.models.registry import model_config
from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.attention import WideHeads
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.pallas_kernels.device import planned_for
from jaxlora.plan.memory.planned import TRACED_ON
from tests import tiny
from tests.llama import LLAMA_8B, LLAMA_70B, decoder

H200 = find_speed("NVIDIA H200")
TINY = dataclasses.replace(
    LLAMA_8B,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    layer_windows=(None,) * 4,
)


def test_operations_of_a_layer():
    """A token takes two operations per weight, without gradients of the base."""
    spec = dataclasses.replace(decoder(LLAMA_8B), slots=None, adapted=())
    work = layer_work(spec, 0, 400.0)
    weights = 4096 * (4096 + 1024 + 1024 + 4096 + 3 * 14336)
    attention = 4 * 4096 * 200
    assert work.forward.flops == 2 * weights + attention
    assert work.backward.flops == 2 * weights + 2.5 * attention


def test_adapters_add_operations():
    spec = decoder(TINY)
    base = dataclasses.replace(spec, slots=None, adapted=())
    some = dataclasses.replace(spec, adapted=("layers.1.mlp.down_proj",))
    without, with_one = (layer_work(s, 1, 100.0) for s in (base, some))
    assert with_one.forward.flops - without.forward.flops == 2 * 16 * (48 + 32)
    assert with_one.backward.flops - without.backward.flops == 4 * 16 * (48 + 32)
    assert layer_work(some, 0, 100.0) == layer_work(base, 0, 100.0)


def test_a_window_bounds_the_work_of_attention():
    config = dataclasses.replace(TINY, layer_windows=(None, 16, None, 16))
    work = [layer_work(decoder(config), layer, 4096) for layer in range(4)]
    assert work[0] == work[2]
    assert work[1] == work[3]
    assert work[0].both.flops > work[1].both.flops
    short = decoder_seconds(decoder(config), H200, mean_tokens=32)
    assert short[1] == short[2]


def test_kernels_of_the_gated_delta_rule_take_less_time():
    config = model_config(
        {
            "model_type": "qwen3_5_text",
            "vocab_size": 64,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-6,
        }
    )
    here = layer_work(decoder(config), 0, 400.0)
    with planned_for(TRACED_ON):
        there = layer_work(decoder(config), 0, 400.0)
    assert there.forward.flops == here.forward.flops
    assert there.both.memory_bytes < 0.5 * here.both.memory_bytes


def test_plain_xla_stores_all_scores_of_wide_heads():
    wide = WideHeads(128, "xla")
    fused, plain = (
        layer_work(decoder(LLAMA_8B, wide_heads=heads), 0, 400.0).forward
        for heads in (None, wide)
    )
    # Queries of a block of 128, and samples of up to 1,024 tokens.
    assert plain.flops - fused.flops == 4 * 4096 * (128 + 1024 - 200)
    assert plain.memory_bytes - fused.memory_bytes == 20 * 32 * (128 + 1024)


def test_recomputation_adds_to_the_backward_pass():
    none, mlp, layer = (
        layer_work(decoder(LLAMA_8B, remat=remat), 0, 400.0)
        for remat in ("none", "mlp", "layer")
    )
    assert none.forward == mlp.forward == layer.forward
    assert none.backward.flops < mlp.backward.flops < layer.backward.flops
    # The down projection makes the layer's output, which nothing needs again.
    down = Work(flops=2 * 4096 * 14336)
    assert layer.backward + down == none.backward + none.forward


def test_only_target_tokens_take_time_in_the_head():
    spec = decoder(TINY)
    whole, half = head_work(spec), head_work(spec, target_share=0.5)
    assert whole.backward == Work()
    assert half.forward.flops == 0.5 * whole.forward.flops == 2 * 32 * 64


def test_the_time_of_llama_8b_on_an_h200():
    """51 µs per token were measured without adapters, and 54 with four."""
    [whole] = stage_seconds(decoder_seconds(decoder(LLAMA_8B), H200), (0, 32))
    assert whole.both == pytest.approx(51e-6, rel=0.025)


@pytest.mark.parametrize("speed", [H200, UNKNOWN_DEVICE])
def test_the_slowest_stage_is_close_to_the_mean(speed):
    for config in (LLAMA_8B, LLAMA_70B):
        times = decoder_seconds(decoder(config), speed)
        borders = stage_borders(decoder(config), 4, speed)
        stages = [t.both for t in stage_seconds(times, borders)]
        assert max(stages) < sum(stages) / 4 + times[1].both


def test_the_last_stage_has_fewer_layers():
    """The head of Llama-3.1-8B costs about as much as a layer.

    With 30 % target tokens it was measured to take as long as half a layer.
    """
    spec = decoder(LLAMA_8B)
    borders = stage_borders(spec, 3, H200)
    assert borders == (0, 11, 22, 32)
    stages = [spec.stage(*pair) for pair in itertools.pairwise(borders)]
    assert [stage.has_embedding for stage in stages] == [True, False, False]
    assert [stage.has_head for stage in stages] == [False, False, True]


def test_one_stage_has_all_layers():
    assert stage_borders(decoder(TINY), 1) == (0, 4)


def test_more_stages_than_layers():
    assert stage_borders(decoder(TINY), 4) == (0, 1, 2, 3, 4)
    with pytest.raises(ConfigError, match=r"stage=5 needs .* model has 4 layers"):
        stage_borders(decoder(TINY), 5)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 PCIe", "unknown"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA L40", "unknown"),
        ("cpu", "unknown"),
    ],
)
def test_devices_are_found_by_their_kind(kind, name):
    assert find_speed(kind).kind == name


def test_only_arithmetic_takes_time_on_an_unknown_device():
    one = UNKNOWN_DEVICE.compute_seconds(Work(flops=100.0))
    both = UNKNOWN_DEVICE.compute_seconds(Work(flops=100.0, memory_bytes=1e9))
    assert one == both > 0
    assert UNKNOWN_DEVICE.transfer_seconds(1e9) == 0


def test_padding_and_scratch_of_experts_do_not_grow_with_tokens():
    """They are of a microbatch: few adapters in large ones have the least padding."""
    mixture = tiny.CONFIG | {"model_type": "qwen3_moe", "num_experts": 6}
    mixture |= {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
    options = DecoderOptions(dtype=jnp.dtype("bfloat16"), max_segment_tokens=64)
    names = [f"layers.0.mlp.experts.{x}_proj" for x in ("down", "gate", "up")]
    spec = DecoderSpec(
        config=model_config(mixture),
        options=options,
        slots=SlotShape(num_slots=8, rank=4, expert_rank=2),
        adapted=tuple(names),
    )

    def forward(**changes):
        own = dataclasses.replace(options, **changes)
        return microbatch_work(dataclasses.replace(spec, options=own), 0, 64).forward

    rows = 6 * (8 + 1) / 2 * 64
    one = 32 * 64 * 2 + 2 * 2 * (32 + 64)
    assert forward().flops == pytest.approx(rows * 3 * one)
    few = forward(most_adapters=2)
    assert few.flops == pytest.approx(6 * (2 + 1) / 2 * 64 * 3 * one)
    assert forward().memory_bytes == 0
    int8 = BaseFormat.named("int8")
    weights = 3 * 6 * 32 * 64
    read = forward(base_format=int8).memory_bytes
    assert read == pytest.approx(3 * weights + 4 * 6 * (32 + 64 + 64))
