"""Keeps compiled programs on disk, so later runs of the same shapes reuse them."""

import logging
import tempfile

import jax

from jaxlora.common.cache_home import cache_home, make_private

logger = logging.getLogger(__name__)


def keep_compiled_programs() -> None:
    """Enables JAX's persistent compilation cache, unless JAX's settings configure it.

    `jax_compilation_cache_dir` (JAX_COMPILATION_CACHE_DIR) names another folder;
    `jax_enable_compilation_cache` (JAX_ENABLE_COMPILATION_CACHE=0) disables the cache.
    """
    chosen = jax.config.jax_compilation_cache_dir is not None
    if chosen or not jax.config.jax_enable_compilation_cache:
        return
    try:
        folder = cache_home() / "xla"
    except RuntimeError:
        logger.info("compiled programs are not kept: there is no home folder")
        return
    try:
        # A program that somebody else wrote would run here.
        make_private(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
        next(folder.iterdir(), None)
    except OSError as error:
        logger.warning(
            "compiled programs are not kept: %s cannot be used: %s. Every start "
            "compiles them again. Set JAX_COMPILATION_CACHE_DIR to another folder.",
            folder,
            error.strerror,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # By default JAX keeps no program that compiles in under a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    logger.info("compiled programs are kept in %s", folder)


def add_advice(warning: str) -> str:
    """Adds advice to the text of a warning if JAX's compilation cache raised it."""
    if "persistent compilation cache entry" not in warning:
        return warning
    return (
        f"{warning}. The program is compiled instead. If this happens again, remove "
        f"{jax.config.jax_compilation_cache_dir}."
    )
