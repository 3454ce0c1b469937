"""The largest capacity that fits, where memory does not grow evenly with it."""

from jaxlora.plan.memory.bounds import Bounds, largest_fitting
from jaxlora.plan.memory.footprint import Footprint
from jaxlora.plan.stages import MeshFootprint

BOUNDS = Bounds(smallest=256, largest=2048, unit=128)
CAPACITIES = range(256, 2049, 128)


def estimate(num_tokens: int | None) -> MeshFootprint:
    """Needs 10 bytes a token, and twice as many with an odd number of units."""
    is_odd = num_tokens is not None and num_tokens % 256
    stage = Footprint(
        base_bytes=1000,
        adapter_bytes=0,
        fixed_bytes=0,
        bytes_per_token=10.0,
        transient_bytes_per_token=10.0 if is_odd else 0.0,
    )
    return MeshFootprint(stages=(stage,))


def test_a_pipeline_needs_what_its_tightest_stage_needs():
    """The last stage has the largest base, and the first one the most per token."""
    first, last = (
        Footprint(
            base_bytes=base,
            adapter_bytes=0,
            fixed_bytes=0,
            bytes_per_token=each,
        )
        for base, each in ((1000, 10.0), (3000, 5.0))
    )
    both = MeshFootprint(stages=(first, last))
    for tokens, tightest in ((100, 1), (500, 0)):
        assert both.tightest(tokens) == tightest
        needed = both.stages[tightest].total_bytes(tokens)
        assert both.total_bytes(tokens) == needed
        assert both.fitting_tokens(needed) == tokens


def test_the_largest_that_fits():
    for num_bytes in range(1000, 50_000, 700):
        fitting = [t for t in CAPACITIES if estimate(t).total_bytes(t) <= num_bytes]
        expected = max(fitting, default=None)
        assert largest_fitting(BOUNDS, estimate, num_bytes) == expected


def test_only_what_may_fit_is_estimated():
    tried = []

    def noted(num_tokens: int | None) -> MeshFootprint:
        tried.append(num_tokens)
        return estimate(num_tokens)

    assert largest_fitting(BOUNDS, noted, 1000 + 11519) == 1024
    assert tried == [None, 1024]
    assert largest_fitting(BOUNDS, noted, 1000 + 11520) == 1024
    assert tried[2:] == [None, 1152, 1024]
    assert largest_fitting(BOUNDS, noted, 1000 + 2559) is None
    assert tried[5:] == [None]
