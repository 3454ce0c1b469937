"""The list `layer_types` of config.json says which layers have a window."""

import pytest

from jaxlora.errors import ModelError
from tests.jaxlora.models.test_config import QWEN_WINDOW, read

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "kinds",
    [
        [],
        [FULL] * 3,
        [FULL] * 5,
        ["chunked_attention"] * 4,
        [FULL] * 3 + [None],
        FULL,
        4,
    ],
)
def test_layer_types_that_transformers_refuses(family, kinds):
    match = "layer_types=.*; wanted one of .* for each of the 4 layers"
    with pytest.raises(ModelError, match=match):
        read(family, layer_types=kinds)


@pytest.mark.parametrize(
    ("family", "more", "match"),
    [
        ("llama", {"layer_types": [SLIDING] * 4}, "no sliding window is in use"),
        ("qwen2", {"layer_types": [SLIDING] * 4}, "no sliding window is in use"),
        (
            "qwen3",
            {**QWEN_WINDOW, "sliding_window": None, "layer_types": [FULL, SLIDING] * 2},
            "no sliding window is in use for this qwen3 model. Set sliding_window",
        ),
        (
            "mistral",
            {"layer_types": [FULL] * 4},
            "sliding_window=4096. Remove layer_ty",
        ),
        ("mistral", {"layer_types": [FULL, SLIDING] * 2}, "all layers of a mistral"),
        (
            "mistral",
            {"sliding_window": None, "layer_types": [SLIDING] * 4},
            "no sliding window is in use",
        ),
    ],
)
def test_layer_types_that_do_not_fit_the_family(family, more, match):
    with pytest.raises(ModelError, match=match):
        read(family, **more)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"layer_types": [FULL] * 4}),
        ("qwen2", {"layer_types": [FULL] * 4}),
        ("mistral", {"layer_types": [SLIDING] * 4}),
        ("mistral", {"sliding_window": None, "layer_types": [FULL] * 4}),
    ],
)
def test_layer_types_that_repeat_what_holds(family, more):
    windows = read(family, **more).layer_windows
    del more["layer_types"]
    assert windows == read(family, **more).layer_windows
