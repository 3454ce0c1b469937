"""The tests, and how annotations are checked while they run: see conftest.py."""

from beartype import BeartypeConf, beartype

# An int is welcome where a float is asked for, as in PEP 484. Variables within
# functions are left to the type checker.
CHECKS = BeartypeConf(is_pep484_tower=True, claw_is_pep526=False)
check = beartype(conf=CHECKS)
