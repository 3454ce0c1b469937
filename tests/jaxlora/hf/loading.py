"""Loads in float32 on every device, as is the default on a CPU."""

import functools

from jaxlora.hf import load

load_model = functools.partial(load.load_model, dtype="float32")
