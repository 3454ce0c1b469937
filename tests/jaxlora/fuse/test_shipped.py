"""The times in the package are of regions that the fusion pass finds today."""

import json

import pytest

from jaxlora.fuse.api import FuseOptions, trace_call
from jaxlora.fuse.regions import kept
from jaxlora.fuse.regions.candidates import best_plans, candidates_of
from jaxlora.fuse.regions.choose import NUM_MEASURED, normal_form
from jaxlora.pallas_kernels.mosaic import hopper
from scripts.bench.fuse.programs import PROGRAMS, abstract

FILES = sorted(kept._SHIPPED.glob("*.json"))
# The programs whose regions were measured.
MEASURED = ("linear", "layer", "layer-plain")


def regions_of(name):
    """Returns the regions of a program, by digest, as on a Hopper GPU."""
    program = abstract(PROGRAMS[name])
    options = FuseOptions("mosaic")
    found = trace_call(program.function, options, program.arguments, {})
    regions = [choice.region for choice in found.rewritten.choices]
    return {normal_form(region): region for region in regions}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_times_are_of_regions_of_the_benchmark(path, monkeypatch):
    kind = json.loads(path.read_text())["device"]
    monkeypatch.setattr(hopper, "num_sms", lambda: 132)
    monkeypatch.setattr(hopper, "device_kind", lambda: kind)
    monkeypatch.setattr(hopper, "unsupported_device", lambda: None)
    shipped = kept.shipped(kind)
    found = {}
    for name in MEASURED:
        found |= regions_of(name)
    assert shipped.keys() <= found.keys()
    for digest, measured in shipped.items():
        plans = best_plans(candidates_of(found[digest], kind), NUM_MEASURED)
        assert measured.of(["xla", *(plan.name for plan in plans)])
