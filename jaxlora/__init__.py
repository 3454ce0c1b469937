"""Train many LoRA adapters at once on one frozen language model.

This trains a list of jobs on a base model and writes one PEFT folder for each:

    import jaxlora

    run = jaxlora.RunConfig(model="path/or/hub-id", jobs=[jaxlora.LoraJob(...), ...])
    result = jaxlora.Trainer(run).train()
"""

from jaxlora._version import __version__
from jaxlora.adapter import Adapter, LoraWeights
from jaxlora.config import DataConfig, LoraJob, RunConfig
from jaxlora.errors import JaxloraError
from jaxlora.hf.load import BaseModel
from jaxlora.hf.load import load_base as load_model
from jaxlora.hf.merge import merge_adapter
from jaxlora.hf.peft_export import export_peft
from jaxlora.hf.peft_import import import_peft
from jaxlora.models.config import ModelConfig
from jaxlora.models.decoder import Decoder, DecoderOptions, DecoderSpec
from jaxlora.modules.multi_lora_linear import (
    BaseParam,
    MultiLoraLinear,
    Routing,
    SlotShape,
    SlotVariable,
)
from jaxlora.run_file import load_run
from jaxlora.train.report import JobResult, RunResult, print_summary
from jaxlora.train.trainer import Trainer

__all__ = [
    "Adapter",
    "BaseModel",
    "BaseParam",
    "DataConfig",
    "Decoder",
    "DecoderOptions",
    "DecoderSpec",
    "JaxloraError",
    "JobResult",
    "LoraJob",
    "LoraWeights",
    "ModelConfig",
    "MultiLoraLinear",
    "Routing",
    "RunConfig",
    "RunResult",
    "SlotShape",
    "SlotVariable",
    "Trainer",
    "__version__",
    "export_peft",
    "import_peft",
    "load_model",
    "load_run",
    "merge_adapter",
    "print_summary",
]
