"""Every form and near miss of this folder, by name.

Importing the modules registers their functions.
"""

from tests.jaxlora.fuse.forms import (  # noqa: F401
    adapters,
    dora,
    dropout,
    expected,
    flax_modules,
    lookalikes,
    near_misses,
    nested,
    other_inputs,
    other_libraries,
    plain,
    rescaled,
    variants,
)
from tests.jaxlora.fuse.forms.form import FORMS, NEAR_MISSES

__all__ = ["FORMS", "NEAR_MISSES"]
