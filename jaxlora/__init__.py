"""Train many LoRA adapters at once on one frozen language model.

This trains a list of jobs on a base model and writes one PEFT folder for each:

    import jaxlora

    run = jaxlora.RunConfig(model="path/or/hub-id", jobs=[jaxlora.LoraJob(...), ...])
    result = jaxlora.Trainer(run).train()

The public names are listed in `__init__.pyi` and are imported on first use. So a part
that needs no JAX, such as `jaxlora.scheduler`, can be imported without it.
"""

# First, so that a checkout that is not installed says so, not what it lacks.
from jaxlora._version import __version__ as __version__

# isort: split
import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
