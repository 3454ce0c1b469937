"""Sessions save, load and sample, and refuse what cannot be."""

import concurrent.futures
import json
import pathlib

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import safetensors.numpy

import jaxlora
from jaxlora import Datum
from jaxlora.errors import CheckpointError, ConfigError, DataError, JaxloraError
from jaxlora.session.datum import ChosenLoss
from jaxlora.session.session import Session
from tests import tiny
from tests.jaxlora.session.conftest import SETTINGS
from tests.jaxlora.session.test_engine import RATE, assert_same, state
from tests.jaxlora.session.test_losses import datums

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


def stepped(session, name, data) -> None:
    session.forward_backward(name, data)
    session.optim_step(name, RATE, weight_decay=0.1)


def test_a_saved_state_goes_on_in_the_same_bits(opened, tiny_model, tmp_path):
    """In a slot of another session, with rows that lie as before."""
    session, path = opened("a"), tmp_path / "a.safetensors"
    first, second = (datums(np.random.default_rng(seed)) for seed in (0, 1))
    stepped(session, "a", first)
    session.save_state("a", path)
    stepped(session, "a", second)
    assert session.optim_step("a", 0.0).result().step == 3
    other = Session(tiny_model, **SETTINGS)
    other.add_adapter("else", rank=2)
    other.load("again", path)
    stepped(other, "again", second)
    assert other.optim_step("again", 0.0).result().step == 3
    assert_same(state(other, "again"), state(session, "a"))


def test_a_folder_of_peft(opened, tiny_model, tmp_path):
    """It has the weights, replaces an earlier one, and starts another adapter."""
    session, data = opened("a"), datums(np.random.default_rng(2))
    session.save("a", tmp_path / "a")
    stepped(session, "a", data)
    session.save("a", tmp_path / "a")
    record = json.loads((tmp_path / "a" / "jaxlora.json").read_text())
    assert (record["job"], record["step"]) == ("a", 1)
    session.load("again", tmp_path / "a")
    found = [session.forward(name, data) for name in ("a", "again")]
    own, other = (one.result().logprobs for one in found)
    for lp, same in zip(own, other, strict=True):
        np.testing.assert_allclose(lp, same, rtol=1e-6)
    moments = {k: x for k, x in state(session, "again").items() if k[0] != "p"}
    assert moments and not any(x.any() for x in moments.values())
    (text,) = jaxlora.generate(
        tiny_model, ["ab"], adapters={"a": tmp_path / "a"}, max_new_tokens=3
    )
    (same,) = session.sample("a", ["ab"], max_new_tokens=3)
    assert same[0].tokens == text.token_ids


def test_gradients_are_part_of_a_saved_state(opened, tiny_model, tmp_path):
    """Also those that are not finite, whose step is then skipped."""
    session, path = opened("a", "b"), tmp_path / "a.safetensors"
    first, second = (datums(np.random.default_rng(seed)) for seed in (0, 1))
    session.forward_backward("a", first)
    session.save_state("a", path)
    stepped(session, "a", second)
    other = Session(tiny_model, **SETTINGS)
    other.load("again", path)
    stepped(other, "again", second)
    for name, one in {"a": session, "again": other}.items():
        assert one.optim_step(name, 0.0).result().step == 2
    assert_same(state(other, "again"), state(session, "a"))
    far = [
        jaxlora.Datum(
            tokens=d.tokens,
            target_tokens=d.target_tokens,
            logprobs=np.full(len(d.tokens), -1e4),
            advantages=d.advantages,
        )
        for d in first
    ]
    session.forward_backward("b", far, "importance_sampling")
    session.save_state("b", path)
    other.load("b", path)
    assert not other.optim_step("b", RATE).result().is_finite


def test_a_removed_adapter_frees_its_slot(session):
    """Further ones wait for their turn, so there may be any number."""
    for name in "abcdef":
        session.add_adapter(name, rank=2)
    session.forward_backward("c", datums(np.random.default_rng(3)))
    session.remove("c")
    session.add_adapter("g", rank=2, seed=1)
    assert session.adapters == ("a", "b", "d", "e", "f", "g")
    assert session.optim_step("g", RATE).result().grad_norm == 0


def test_threads_take_turns(opened):
    """Each has the results of its own adapter, and no call is lost."""
    session, steps = opened("a", "b"), {}
    data = datums(np.random.default_rng(4), (50, 3, 60, 2, 90))

    def train(name: str) -> None:
        for _ in range(4):
            done = session.forward_backward(name, data)
            step = session.optim_step(name, RATE)
            assert len(done.result().logprobs) == len(data)
            steps.setdefault(name, []).append(step.result().step)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        list(threads.map(train, ("a", "b")))
    assert steps == {"a": [1, 2, 3, 4], "b": [1, 2, 3, 4]}


def test_log_probabilities_of_sampler_and_trainer_agree(opened):
    """And the sampler keeps its copy of the adapter."""
    session, prompts = opened("a", "b"), [[3, 4, 5], [7], [9, 8]]
    sampler = session.publish("b")
    options = {"num_samples": 2, "max_new_tokens": 6, "temperature": 1.0, "seed": 5}
    found = sampler.sample(prompts, **options)
    assert [len(some) for some in found] == [2, 2, 2]
    every = [one for some in found for one in some]
    assert [one.prompt for one in every[::2]] == [(3, 4, 5), (7,), (9, 8)]
    assert every[0].tokens != every[1].tokens
    data = [
        Datum.of(c.prompt, c.tokens, logprobs=c.logprobs, advantages=1.0) for c in every
    ]
    result = session.forward_backward("b", data, "importance_sampling").result()
    for one, lp in zip(every, result.logprobs, strict=True):
        np.testing.assert_allclose(lp[-len(one.tokens) :], one.logprobs, rtol=1e-4)
    num_tokens = sum(len(one.tokens) for one in every)
    assert result.loss == pytest.approx(-num_tokens, rel=1e-4)  # all ratios are 1
    session.optim_step("b", RATE).result()
    assert sampler.sample(prompts, **options) == found
    assert session.sample("b", prompts, **options) != found


def test_ends_of_completions(opened):
    session = opened("a")
    (greedy,) = session.sample("a", ["abc"], max_new_tokens=8)[0]
    (again,) = session.sample("a", [greedy.prompt], max_new_tokens=8)[0]
    assert again == greedy and greedy.finish_reason == "length"
    last = greedy.tokens[2]
    (short,) = session.sample("a", ["abc"], end_tokens=[last])[0]
    assert short.finish_reason == "eos_token"
    assert short.tokens == greedy.tokens[: greedy.tokens.index(last) + 1]
    text = session.tokenizer.decode(greedy.tokens)
    (stopped,) = session.sample("a", ["abc"], stop=text[1], max_new_tokens=8)[0]
    assert stopped.finish_reason == "stop_sequence"


def test_datums_of_completions():
    found = Datum.of([1, 2, 3], [4, 5], logprobs=[-1, -2], advantages=0.5)
    assert found.tokens.tolist() == [1, 2, 3, 4]
    assert found.target_tokens.tolist() == [2, 3, 4, 5]
    assert found.weights.tolist() == [0, 0, 1, 1]
    assert found.logprobs.tolist() == [0, 0, -1, -2]
    assert found.advantages.tolist() == [0, 0, 0.5, 0.5]


ONE = {"tokens": [1, 2], "target_tokens": [2, 3]}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"tokens": [], "target_tokens": []}, "tokens is empty"),
        (ONE | {"tokens": [1.5, 2]}, "a list of token ids"),
        (ONE | {"tokens": [-1, 2]}, "a list of token ids"),
        (ONE | {"tokens": "ab"}, "a list of token ids"),
        (ONE | {"tokens": [[1], [2, 3]]}, "a list of token ids"),
        (ONE | {"target_tokens": [1]}, "target_tokens has 1 numbers, and there are 2"),
        (ONE | {"weights": [1, float("nan")]}, "a list of finite numbers"),
        (ONE | {"weights": [[1, 2]]}, "a list of finite numbers"),
        (ONE | {"advantages": ["x", 2]}, "Give a list of numbers"),
        (ONE | {"logprobs": [1, 2, 3]}, "logprobs has 3 numbers"),
    ],
)
def test_wrong_datums(given, error):
    with pytest.raises(DataError, match=error):
        Datum(**given)


@pytest.fixture
def unchecked(monkeypatch):
    """Types are not checked, as outside of these tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def test_wrong_calls(session, tmp_path, unchecked):
    session.add_adapter("a", rank=2)
    one, long = Datum(**ONE), Datum(tokens=[1] * 97, target_tokens=[1] * 97)
    odd = Datum(tokens=[300], target_tokens=[1])
    for call, error in {
        lambda: session.forward("b", [one]): "no adapter 'b'; there are: a",
        lambda: session.forward("a", []): "there are no datums",
        lambda: session.forward("a", [one, long]): "datum 1: it has 97 positions",
        lambda: session.forward("a", [odd]): "datum 0: it has token 300",
        lambda: session.forward("a", [one], "ppo"): "datum 0: it has no advantages",
        lambda: session.forward("a", [one], "hinge"): "'hinge' must be one of cross_en",
        lambda: session.forward("a", [one], "dro"): "beta=None of the loss dro must be",
        lambda: session.forward("a", [one], "ppo", {"low": 1}): "'low' is no setting",
        lambda: session.optim_step("a", -1.0): "learning_rate",
        lambda: session.optim_step("a", 1.0, betas=(0.9, 1.0)): "betas",
        lambda: session.add_adapter("a"): "an adapter 'a' already",
        lambda: session.add_adapter("b", rank=9): "rank 9 in .*, and the slots have 8",
        lambda: session.add_adapter("../b"): "plain folder name",
        lambda: session.add_adapter("b", target_modules=["x"]): "'x'",
        lambda: session.add_adapter(3): "adapter name 3 must be",
        lambda: session.forward("a", one): "data is one Datum. Give a list",
        lambda: session.forward(
            "a", [one], "ppo", {"clip_low_threshold": 2}
        ): "=2 of the loss ppo is larger than clip_high_threshold=1.2",
        lambda: session.sample("a", "text"): "'text' is one text. Give a list",
        lambda: session.sample("a", [[]]): "prompt 1: it must be a text, or a list",
        lambda: session.sample("a", [1, 2]): "prompt 1: .* and is 1",
        lambda: session.sample("a", [[1.5]]): r"prompt 1: .* and is \[1.5\]",
        lambda: session.sample("a", [[1]], num_samples=0): "num_samples=0 must be",
        lambda: session.sample("a", [[1]], end_tokens=["x"]): "end_tokens=.* must be",
        lambda: session.sample("a", [[1]], heat=1): "heat",
        lambda: session.load("b", tmp_path / "none"): "there is no such file",
        lambda: Session(session._engine.model, ranks=3): "ranks",
        lambda: Session(session._engine.model, microbatch_tokens=100): "Set it to 128",
    }.items():
        with pytest.raises(JaxloraError, match=error):
            call()
    assert session.adapters == ("a",)


def test_experts_are_written_as_a_run_writes_them(tmp_path):
    """By the names that other programs know for the model."""
    session = Session(GOLDEN / "models" / "mixtral", slots=1, microbatch_tokens=64)
    session.add_adapter("a")
    session.save("a", tmp_path / "a")
    tensors = safetensors.numpy.load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert any(".block_sparse_moe.experts.0.w1." in name for name in tensors)


def test_the_cure_of_a_rank_of_experts_that_is_too_large(tmp_path):
    """A fused folder has twice the rank for gate and up."""
    base, folder = GOLDEN / "models" / "qwen2_moe", tmp_path / "a"
    session = Session(base, slots=2, rank=12, microbatch_tokens=64)
    session.add_adapter("a")
    session.save("a", folder)
    with pytest.raises(ConfigError, match="set rank=24 when the session is made"):
        session.load("b", folder)
    session = Session(base, slots=1, rank=24, microbatch_tokens=64)
    session.load("b", folder)


def test_numbers_of_other_libraries_are_numbers(unchecked):
    datum = Datum.of([1], [2, 3], logprobs=[0, 0], advantages=jnp.float32(0.5))
    assert datum.advantages.tolist() == [0.5, 0.5]
    loss = ChosenLoss.of("dro", {"beta": np.float32(0.5)})
    assert loss.settings == {"beta": 0.5}


def test_a_loss_of_your_own_that_is_not_finite(session):
    session.add_adapter("a", rank=2)
    with pytest.raises(DataError, match="datum 0: the gradient of the loss"):
        session.forward_backward_custom(
            "a", [Datum(**ONE)], lambda data, logprobs: (0 * logprobs[0]).sum() ** 0.5
        )
    with pytest.raises(DataError, match=r"metric 'x' as an array of shape \(2,\)"):
        session.forward_backward_custom(
            "a", [Datum(**ONE)], lambda data, lps: (lps[0].sum(), {"x": lps[0]})
        )
    assert session.optim_step("a", RATE).result().grad_norm == 0


def test_wrong_files_of_states(session, tmp_path):
    session.add_adapter("a", rank=2)
    path = tmp_path / "a.safetensors"
    session.save_state("a", path)
    data = path.read_bytes()
    other = Session(tiny.write_model(tmp_path / "other", seed=1), **SETTINGS)
    with pytest.raises(CheckpointError, match="of another base model"):
        other.load("a", path)
    plain = safetensors.numpy.save({"params/x": np.zeros(2, np.float32)})
    for damaged in (data[:-5], plain, data.replace(b'"rank', b'"ronk', 1), b""):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged, or no file"):
            session.load("b", path)
    assert session.adapters == ("a",)
