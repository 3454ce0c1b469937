"""The tiny model of the tests of training."""

from tests.jaxlora.train.conftest import model as model
