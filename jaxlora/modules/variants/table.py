"""The table of the variants of LoRA: each setting of `LoraJob` that names one.

A variant is a file of this folder, and the setting that has its name.
"""

import functools
import importlib
from collections.abc import Callable

from jaxlora.config.lora_job import LoraJob, VariantFile
from jaxlora.modules.variants.variant import TrainedTensor, Variant


def variants() -> tuple[Variant, ...]:
    """LoRA, and then the variants in the order of their settings."""
    return _loaded()


@functools.cache
def _loaded() -> tuple[Variant, ...]:
    fields = LoraJob.model_fields.values()
    marks = [mark for field in fields for mark in field.metadata]
    names = [mark.name for mark in marks if isinstance(mark, VariantFile)]
    # The settings are read without JAX, which the files import.
    modules = (importlib.import_module(f"{__package__}.{n}") for n in ("lora", *names))
    return tuple(module.VARIANT for module in modules)


def variants_with(is_set: Callable[[str], object]) -> tuple[Variant, ...]:
    """The variants of an adapter; one that replaces LoRA takes that away.

    Args:
        is_set: Returns whether a setting, such as `use_dora`, is on.
    """
    found = [v for v in variants() if v.setting is None or is_set(v.setting)]
    is_replaced = any(variant.replaces_lora for variant in found)
    return tuple(v for v in found if v.setting is not None or not is_replaced)


def replaces_lora(is_set: Callable[[str], object]) -> bool:
    """Whether an adapter has a variant in the place of A and B."""
    return any(variant.replaces_lora for variant in variants_with(is_set))


def variant_of(tensor: TrainedTensor) -> Variant:
    """The variant that trains a tensor."""
    return next(v for v in variants() if tensor in v.tensors)
