"""Settings of every test."""

import os
import tempfile

import jax

# Runs of the same shapes compile once in a session, in subprocesses too; and no test
# writes into the user's cache.
_CACHE = tempfile.TemporaryDirectory(prefix="jaxlora-tests-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
jax.config.update("jax_compilation_cache_dir", _CACHE.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

# Pallas' GPU interpreter runs a kernel's threads at once, each of which may wait for
# another; dispatched to a small pool, they would wait for each other's place in it.
jax.config.update("jax_cpu_enable_async_dispatch", False)

# On a GPU, float32 products would otherwise run in tf32.
jax.config.update("jax_default_matmul_precision", "highest")
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
