"""The picture has every kernel and the cuts; that of a large graph is folded."""

import re

import jax
import pytest

from jaxlora.errors import JaxloraError, StorageError
from jaxlora.fuse.predict.cut import find_cuts
from jaxlora.fuse.predict.graph import data_flow
from jaxlora.fuse.predict.kernel_rates import describe_device
from jaxlora.fuse.predict.picture import save_picture
from tests.jaxlora.fuse import linears
from tests.jaxlora.fuse.linears import shape

H200 = describe_device("NVIDIA H200")


def draw(jaxpr, path):
    graph = data_flow(jaxpr)
    save_picture(graph, find_cuts(graph, H200), H200, path)
    return path.read_text()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The SVG of a training linear; matplotlib writes each text as a comment."""
    return draw(linears.training(), tmp_path_factory.mktemp("svg") / "linear.svg")


def test_products_and_masks_are_named(text):
    assert text.count("product 8192 x 4096 x 4096, add") == 2
    assert text.count("<!-- random_bits") == 1


def test_cuts_are_drawn_and_labelled(text):
    assert text.count("bfloat16[8192,16]") >= 2
    assert "bool[8192,4096]" in text
    cut_style = r'style="[^"]*stroke-dasharray[^"]*stroke: #c0262d'
    assert len(re.findall(cut_style, text)) >= 3


def test_the_same_graph_gives_the_same_bytes(text, tmp_path):
    assert draw(linears.training(), tmp_path / "again.svg") == text


def test_a_large_graph_is_folded(tmp_path):
    def layer(x, w, a, b):
        return jax.nn.silu(x @ w + 2 * (x @ a) @ b)

    def run(x, layers):
        for one in layers:
            x = layer(x, *one)
        return x

    layers = [(shape(2048, 2048), shape(2048, 16), shape(16, 2048))] * 24
    text = draw(jax.make_jaxpr(run)(shape(8192, 2048), layers), tmp_path / "deep.svg")
    assert text.count("<!-- product 8192 x 2048 x 2048, add") == 24
    assert "<!-- product 8192 x 2048 x 16 " not in text
    assert "5 kernels, " in text


def test_other_formats_are_refused(tmp_path):
    with pytest.raises(JaxloraError, match=r"\.svg or \.png"):
        draw(linears.forward(), tmp_path / "linear.pdf")


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="cannot be written"):
        draw(linears.forward(), tmp_path / "nowhere" / "linear.svg")
