"""Training by the routes gives the results of a session."""

import numpy as np
import pytest

from jaxlora import Session
from tests.jaxlora.serve.tinker.conftest import (
    ADAM,
    NAME,
    logprobs_of,
    pass_request,
)
from tests.jaxlora.session.conftest import SETTINGS
from tests.jaxlora.session.test_losses import CONFIGS, datums


@pytest.mark.parametrize("loss", CONFIGS)
def test_losses_are_those_of_a_session(api, tiny_model, loss):
    """The loss, all log-probabilities, and the weights after a step."""
    data, config = datums(np.random.default_rng(3)), CONFIGS[loss]
    session = Session(tiny_model, **SETTINGS)
    session.add_adapter("one", rank=4, seed=1)
    model, found, expected = api.model(), [], []
    for step in range(2):
        seq_id = 2 * step + 1
        request = pass_request(model, seq_id, data, loss, config)
        promise = api.good(api.submit(request))
        stepped = api.post(
            "optim_step", model_id=model, seq_id=seq_id + 1, adam_params=ADAM
        )
        found.append(api.output(promise))
        assert api.result(stepped)["metrics"]["step:max"] == step + 1
        expected.append(session.forward_backward("one", data, loss, config).result())
        session.optim_step("one", **ADAM).result()
    for output, result in zip(found, expected, strict=True):
        assert output.metrics["loss:sum"] == pytest.approx(result.loss, rel=1e-6)
        for got, right in zip(logprobs_of(output), result.logprobs, strict=True):
            np.testing.assert_array_equal(got, right)


def test_first_things(api):
    assert api.post("client/config", sdk_version="0")["parallel_fwdbwd_chunks"]
    assert api.get("healthz") == {"status": "ok"}
    (model,) = api.get("get_server_capabilities")["supported_models"]
    assert model["model_name"] == NAME
    id = api.model()
    info = api.post("get_info", model_id=id)
    assert info["lora_rank"] == 4 and info["model_data"]["tokenizer_id"] == NAME
