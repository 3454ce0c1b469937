"""The tiny models of the tests of training."""

from tests.jaxlora.train.conftest import model as model
from tests.jaxlora.train.conftest import two_layers as two_layers
