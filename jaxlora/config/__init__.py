"""The user's settings: read, checked, overridden and explained."""

from jaxlora.config.data_config import DataConfig
from jaxlora.config.run_config import LoraJob, RunConfig, check_job_name

__all__ = ["DataConfig", "LoraJob", "RunConfig", "check_job_name"]
