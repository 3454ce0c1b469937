"""Keeps compiled programs on disk, so later runs of the same shapes reuse them.

There are two caches. JAX's own one spares XLA's work for a program that is traced and
lowered again. `jaxlora.programs` keeps whole programs, which are not even traced again.
"""

import logging
import os
import pathlib
import tempfile

import jax

from jaxlora.common.cache_home import cache_home, make_private
from jaxlora.programs.kept import KeptPrograms
from jaxlora.programs.program import keep_programs

logger = logging.getLogger(__name__)

SWITCH = "JAXLORA_KEEP_PROGRAMS"  # 0 keeps no whole programs


def keep_compiled_programs(*, will_compile: bool = True) -> None:
    """Enables both caches, unless JAX's settings configure or disable them.

    `jax_compilation_cache_dir` (JAX_COMPILATION_CACHE_DIR) names another folder;
    `jax_enable_compilation_cache` (JAX_ENABLE_COMPILATION_CACHE=0) disables both
    caches, and JAXLORA_KEEP_PROGRAMS=0 that of whole programs.

    Args:
        will_compile: Whether this process compiles programs; see `keep_programs`.
    """
    keep_programs(None)
    chosen = jax.config.jax_compilation_cache_dir
    if not jax.config.jax_enable_compilation_cache or chosen == "":
        return
    if chosen is not None and chosen != _OWN.get("xla"):
        if "://" not in chosen:
            folder = pathlib.Path(chosen) / "jaxlora-programs"
            _keep_whole(folder, will_compile=will_compile)
        return
    try:
        home = cache_home()
    except RuntimeError:
        logger.info("compiled programs are not kept: there is no home folder")
        return
    if chosen is not None or _keep_in_xlas(home / "xla"):
        _keep_whole(home / "programs", will_compile=will_compile)


_OWN: dict[str, str] = {}  # the folder that this module has chosen for JAX's cache


def _keep_whole(folder: pathlib.Path, *, will_compile: bool) -> None:
    if os.environ.get(SWITCH) == "0":
        return
    try:
        # A program that somebody else wrote would run here.
        make_private(folder)
    except OSError as error:
        logger.warning(
            "whole programs are not kept: %s cannot be used: %s. Every start traces "
            "its programs again.",
            folder,
            error.strerror,
        )
        return
    keep_programs(KeptPrograms(folder=folder), will_compile=will_compile)


def _keep_in_xlas(folder: pathlib.Path) -> bool:
    """Enables JAX's cache; returns whether the folder can be used."""
    try:
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
        return False
    _OWN["xla"] = str(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # By default JAX keeps no program that compiles in under a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    logger.info("compiled programs are kept in %s", folder.parent)
    return True


def add_advice(warning: str) -> str:
    """Adds advice to the text of a warning if JAX's compilation cache raised it."""
    if "persistent compilation cache entry" not in warning:
        return warning
    return (
        f"{warning}. The program is compiled instead. If this happens again, remove "
        f"{jax.config.jax_compilation_cache_dir}."
    )
