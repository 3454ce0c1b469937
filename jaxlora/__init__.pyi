from ._version import __version__
from .adapters.adapter import Adapter, LoraWeights
from .adapters.files.merge import merge_adapter
from .adapters.files.peft_export import export_peft
from .adapters.files.peft_import import import_peft
from .adapters.optimizers.register import register_optimizer
from .config import DataConfig, LoraJob, RunConfig
from .config.generation_settings import GenerationSettings
from .config.run_file import load_run
from .config.sweep_config import Sweep
from .data.formats.example import Example
from .data.formats.register import register_format
from .errors import JaxloraError
from .fuse.api import fuse
from .fuse.explain import explain
from .generate.api import generate
from .generate.generator import Generator
from .generate.prompt import Generation, Prompt
from .hf.load import FrozenModel, load_model
from .models.config import ModelConfig
from .models.decoder import Decoder
from .models.options import DecoderOptions
from .models.spec import DecoderSpec
from .modules.base_param import BaseParam
from .modules.multi_lora_linear import MultiLoraLinear, SlotVariable
from .modules.routing import Routing
from .modules.slot_shape import SlotShape
from .objectives.base import Objective, ObjectiveSettings
from .objectives.register import register_objective
from .run.callback import Callback
from .session.datum import Datum
from .session.session import Session
from .sweeps.control import Trainer
from .sweeps.files import print_summary
from .train.report.summary import JobResult, RunResult

__all__ = [
    "Adapter",
    "BaseParam",
    "Callback",
    "DataConfig",
    "Datum",
    "Decoder",
    "DecoderOptions",
    "DecoderSpec",
    "Example",
    "FrozenModel",
    "Generation",
    "GenerationSettings",
    "Generator",
    "JaxloraError",
    "JobResult",
    "LoraJob",
    "LoraWeights",
    "ModelConfig",
    "MultiLoraLinear",
    "Objective",
    "ObjectiveSettings",
    "Prompt",
    "Routing",
    "RunConfig",
    "RunResult",
    "Session",
    "SlotShape",
    "SlotVariable",
    "Sweep",
    "Trainer",
    "__version__",
    "explain",
    "export_peft",
    "fuse",
    "generate",
    "import_peft",
    "load_model",
    "load_run",
    "merge_adapter",
    "print_summary",
    "register_format",
    "register_objective",
    "register_optimizer",
]
