"""Run files from the settings of Axolotl, LLaMA-Factory, TRL and PEFT."""

from jaxlora.migrate.migration import Migration
from jaxlora.migrate.tools import migrate_file

__all__ = ["Migration", "migrate_file"]
