"""`jaxlora plan`: predicts a run without training it.

The names are listed in `__init__.pyi` and are imported on first use, so that the
process which plans groups can start the devices first.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
