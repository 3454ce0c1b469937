"""Metadata of a run's base model, without its weights."""

import dataclasses
import pathlib

import jax.numpy as jnp

from jaxlora.config import RunConfig
from jaxlora.config.base_settings import BaseSettings
from jaxlora.families.model_config import ModelConfig
from jaxlora.hf.base_format import find_base_format
from jaxlora.hf.checkpoint import planned_checkpoint
from jaxlora.hf.load import FrozenModel, base_dtype
from jaxlora.models.base_format import BaseFormat
from jaxlora.models.decoder import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.plan.job.quantized_base import run_format


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A base model without weights.

    Attributes:
        config: Architecture of the model.
        dtype: Dtype of the weights that are not quantized.
        base_format: How its linears are quantized; None: they are not.
    """

    config: ModelConfig
    dtype: jnp.dtype
    base_format: BaseFormat | None

    @staticmethod
    def of(settings: BaseSettings, model: FrozenModel) -> "PlannedModel":
        """Describes a model that is loaded.

        Raises:
            ConfigError: Settings of the base do not fit the model.
        """
        base_format = run_format(settings, model.config, model.base_format)
        return PlannedModel(
            config=model.config, dtype=model.dtype, base_format=base_format
        )

    @property
    def spec(self) -> DecoderSpec:
        """The decoder without slots."""
        options = DecoderOptions(
            dtype=self.dtype, base_format=self.base_format, max_segment_tokens=1
        )
        return DecoderSpec(config=self.config, options=options)


def planned_model(config: RunConfig, folder: pathlib.Path) -> PlannedModel:
    """Describes the base model of a run; its weights need not exist.

    Args:
        config: The run.
        folder: Folder with the model's config.json.

    Raises:
        JaxloraError: config.json is damaged or of an unsupported kind, settings of the
            base do not fit the model, or the headers of weights that are there are
            damaged.
    """
    # A folder of the hub's cache may hold a part of the weights.
    is_local = pathlib.Path(config.model).exists()
    has_weights = is_local and any(folder.glob("*.safetensors"))
    checkpoint = planned_checkpoint(folder, checks_weights=has_weights)
    return PlannedModel(
        config=checkpoint.config,
        dtype=jnp.dtype(base_dtype(config.dtype)),
        base_format=find_base_format(
            checkpoint,
            config.quantize_base,
            config.keep_bf16,
            quantize_args=config.quantize_base_args,
        ),
    )
