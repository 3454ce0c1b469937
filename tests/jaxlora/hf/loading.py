"""Loading in float32, as it is by default on a CPU, on every device."""

import functools

from jaxlora.hf import load

load_model = functools.partial(load.load_model, dtype="float32")
