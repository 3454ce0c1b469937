"""The user's settings: read, checked, overridden and explained."""

from jaxlora.config.data_config import DataConfig
from jaxlora.config.lora_job import LoraJob
from jaxlora.config.run_config import RunConfig

__all__ = ["DataConfig", "LoraJob", "RunConfig"]
