"""The tests, and how annotations are checked while they run: see conftest.py."""

from beartype import BeartypeConf, BeartypeDecorPlace, beartype

# beartype's import hook takes neither Triton's kernels, nor classes that are generic or
# imported for the type checker alone.
JAXTYPING_ONLY = ("jaxlora.pallas_kernels", "jaxlora.fuse", "jaxlora.cli")
CHECKS = BeartypeConf(
    # An int is welcome where a float is asked for, as in PEP 484.
    is_pep484_tower=True,
    # Variables within functions are left to the type checker.
    claw_is_pep526=False,
    # Inside jax.jit, whose result has methods of its own.
    claw_decor_place_func=BeartypeDecorPlace.FIRST,
    # The scheduler has no arrays, and its inner loops would run five times as long.
    claw_skip_package_names=("jaxlora.scheduler", *JAXTYPING_ONLY),
)
check = beartype(conf=CHECKS)
