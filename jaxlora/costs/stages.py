"""Divides a decoder into pipeline stages by the estimated time of its parts."""

import functools
import itertools
from collections.abc import Iterable, Sequence

from jaxlora.costs.gpus import UNKNOWN_DEVICE, DeviceSpeed
from jaxlora.costs.work import (
    Passes,
    Work,
    embedding_work,
    head_work,
    layer_work,
    microbatch_work,
)
from jaxlora.errors import ConfigError
from jaxlora.models.options import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.sharding.stages import cut_layers

# Guesses about the data, which are not known when weights are read: the mean number of
# tokens of a sample, and the share of tokens that are trained on. Only those go through
# the head, and the prompts of instruction data are masked.
_MEAN_TOKENS = 512.0
_TARGET_SHARE = 0.4


@functools.lru_cache(maxsize=32)  # a choice of a mesh asks hundreds of times
def decoder_seconds(
    spec: DecoderSpec,
    speed: DeviceSpeed = UNKNOWN_DEVICE,
    *,
    mean_tokens: float | None = None,
) -> tuple[Passes[float], ...]:
    """Estimates the time of one token in each layer of a decoder, on one device.

    The embedding counts to the first layer; the final norm, the head and the loss count
    to the last. On a device with unknown rates, time is counted in operations.

    Args:
        spec: The whole decoder.
        speed: Rates of the device.
        mean_tokens: Mean length of the samples; None: that of the decoder's options.
    """
    mean = spec.options.mean_segment_tokens if mean_tokens is None else mean_tokens

    def seconds(work: Passes[Work]) -> Passes[float]:
        return Passes(
            forward=speed.compute_seconds(work.forward),
            backward=speed.compute_seconds(work.backward),
        )

    # The backward pass of attention computes its scores again, and `layer` all of it.
    again = 0.3 if spec.options.remat == "layer" else 0.0
    each = speed.attention_seconds
    attention = Passes(forward=each * 0.3, backward=each * (0.7 + again))
    layers = [
        seconds(layer_work(spec, layer, mean)) + attention
        for layer in range(spec.config.num_layers)
    ]
    layers[0] += seconds(embedding_work(spec))
    layers[-1] += seconds(head_work(spec, _TARGET_SHARE))
    return tuple(layers)


def microbatch_seconds(
    spec: DecoderSpec, num_tokens: int, speed: DeviceSpeed = UNKNOWN_DEVICE
) -> float:
    """Estimates the time of a microbatch that no token adds to, as of experts."""
    layers = range(spec.config.num_layers)
    works = (microbatch_work(spec, i, num_tokens) for i in layers)
    return sum(speed.compute_seconds(work.both) for work in works)


def total(layers: Iterable[Passes[float]]) -> Passes[float]:
    """Returns the time of one token in all of these layers."""
    return sum(layers, Passes(forward=0.0, backward=0.0))


def stage_seconds(
    layers: Sequence[Passes[float]], borders: Sequence[int]
) -> list[Passes[float]]:
    """Returns the time of one token in each stage; see `stage_borders`."""
    return [total(layers[a:b]) for a, b in itertools.pairwise(borders)]


@functools.lru_cache(maxsize=16)
def stage_borders(
    spec: DecoderSpec, num_stages: int, speed: DeviceSpeed = UNKNOWN_DEVICE
) -> tuple[int, ...]:
    """Returns the borders of the stages between which the slowest is fastest.

    Adapters are left out, so that the stages are known before the jobs are.

    Args:
        spec: The whole decoder.
        num_stages: Number of stages.
        speed: Rates of the devices.

    Returns:
        Stage s has the layers from `borders[s]` to `borders[s + 1] - 1`.

    Raises:
        ConfigError: There are more stages than layers.
    """
    num_layers = spec.config.num_layers
    if num_stages == 1:
        return 0, num_layers
    if num_stages > num_layers:
        raise ConfigError(
            f"mesh: stage={num_stages} needs a layer for each stage, and the model "
            f"has {num_layers} layers. Use at most stage={num_layers}."
        )
    options = DecoderOptions(
        dtype=spec.options.dtype, remat=spec.options.remat, max_segment_tokens=1
    )
    plain = DecoderSpec(config=spec.config, options=options)
    layers = decoder_seconds(plain, speed, mean_tokens=_MEAN_TOKENS)
    return cut_layers([layer.both for layer in layers], num_stages)
