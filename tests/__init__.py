"""The tests, and how annotations are checked while they run: see conftest.py."""

from beartype import BeartypeConf, beartype

# An int is welcome where a float is asked for, as in PEP 484.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
