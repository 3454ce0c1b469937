"""Stands in for kernels and a compiler that are not here, when memory is estimated."""

import dataclasses

from jaxlora.models.spec import DecoderSpec
from jaxlora.modules.attention import AttentionImplementation
from jaxlora.modules.attention_table import ATTENTIONS
from jaxlora.pallas_kernels import get_backend
from jaxlora.pallas_kernels.device import PlannedDevice, planned_for
from jaxlora.plan.job.kernel_choice import kernels_unsupported

# A Hopper GPU, whose kernels can be traced anywhere.
TRACED_ON = PlannedDevice(
    kind="NVIDIA H200", capability=90, num_sms=132, memory_bytes=0
)


def traceable(spec: DecoderSpec, block_tokens: int) -> DecoderSpec:
    """Returns a decoder that keeps the same arrays, and can be traced on `TRACED_ON`.

    Linears that the other kernels cannot run are traced as plain XLA, which keeps more.
    """
    options = spec.options
    attention = _traced(options.attention, spec)
    if (wide := options.wide_heads) is not None:
        wide = wide._replace(implementation=_traced(wide.implementation, spec))
    name = get_backend(options.implementation).traced_as
    if name is None:
        name = options.implementation
    else:
        with planned_for(TRACED_ON):
            why = kernels_unsupported(get_backend(name), spec, block_tokens)
        name = name if why is None else "xla"
    options = dataclasses.replace(
        options, implementation=name, attention=attention, wide_heads=wide
    )
    return dataclasses.replace(spec, options=options)


def _traced(
    name: AttentionImplementation, spec: DecoderSpec
) -> AttentionImplementation:
    """Returns an attention that keeps the same arrays, and can be traced."""
    traced = ATTENTIONS[name].traced_as
    if traced is None:
        return name
    why_not = ATTENTIONS[traced].unsupported(spec.options.dtype, spec.config)
    return traced if why_not is None else "xla"
