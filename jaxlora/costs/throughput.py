"""Predicts the throughput of microbatches of one size."""

from jaxlora.costs.device_speed import DeviceSpeed
from jaxlora.costs.stages import decoder_seconds
from jaxlora.models.spec import DecoderSpec

# A quarter of a mean sample is free at the end of a microbatch. It would be half of one
# if all samples were equally long, and nothing if lengths of all kinds were at hand.
_FREE_SAMPLES = 0.25


def seconds_per_token(
    spec: DecoderSpec,
    speed: DeviceSpeed,
    capacity: int,
    *,
    sample_tokens: float = 0.0,
) -> float:
    """Predicts the time of training on one token of a sample.

    A microbatch takes the time of its whole capacity, and that of reading the weights.
    Small microbatches are slower for that, and for the room that samples leave.

    Args:
        spec: The decoder; its `remat` adds the work that is done again.
        speed: Rates of the device.
        capacity: Capacity of a microbatch, in tokens.
        sample_tokens: Mean length of the samples.

    Returns:
        The time, in the unit of `decoder_seconds`.
    """
    each = decoder_seconds(spec, speed).whole.both
    filled = max(1.0, capacity - _FREE_SAMPLES * sample_tokens)
    return (capacity + speed.weight_tokens) * each / filled
