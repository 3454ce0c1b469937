"""Transformations of users are optimizers like ours, or are refused with the reason."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxlora
from jaxlora import LoraJob
from jaxlora.adapters.optimizers import register as registered
from jaxlora.adapters.optimizers.table import OPTIMIZERS, find_optimizer
from jaxlora.config import DataConfig
from jaxlora.errors import ConfigError
from tests.jaxlora.adapters import test_optimizer_steps as steps

BEFORE = dict(OPTIMIZERS)


@pytest.fixture(autouse=True)
def table():
    """Names that a test registers are free again after it."""
    yield
    OPTIMIZERS.clear()
    OPTIMIZERS.update(BEFORE)


def finished(*parts, learning_rate, weight_decay):
    return optax.chain(
        *parts,
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )


def adagrad(learning_rate, weight_decay, *, eps=1e-7):
    return finished(
        optax.scale_by_rss(eps=eps),
        learning_rate=learning_rate,
        weight_decay=weight_decay,
    )


def make(init, update):
    """A function that makes a transformation of these functions."""
    return lambda learning_rate, weight_decay: optax.GradientTransformation(
        init, update
    )


def noise(learning_rate, weight_decay, *, scale=0.1):
    """Writes beyond the rank of an adapter, and has a key in its state."""

    def init(params):
        return {"key": jax.random.PRNGKey(0)}

    def update(updates, state, params=None):
        key, own = jax.random.split(state["key"])
        noisy = lambda g: g + scale * jax.random.normal(own, g.shape)
        return jax.tree.map(noisy, updates), {"key": key}

    return optax.GradientTransformation(init, update)


def test_a_registered_optimizer_trains_beside_others(monkeypatch):
    """Like its definition at its own rank, with the bits that it has alone."""
    jaxlora.register_optimizer("adagrad", adagrad)
    slots = ("adagrad", "lion", "adagrad")
    monkeypatch.setattr(steps, "NAMES", (*steps.NAMES, "adagrad"))
    monkeypatch.setitem(steps.RANKS, "adagrad", 3)
    together, alone = steps.trained(slots), steps.trained(("adagrad",))
    for slot in (0, 2):
        for path, table in alone.params.items():
            np.testing.assert_array_equal(together.params[path][slot], table[0])
    stack, index = "q.lora_b", (1, *steps.own("adagrad", "q.lora_b"))
    params = {"w": jnp.array(steps.drawn("adagrad", -1)[stack][index])}
    kept = adagrad(0.0, 0.0).init(params)
    # optax starts it at 0.1, not at zero.
    assert (kept[0].sum_of_squares["w"] == jnp.float32(0.1)).all()
    for step in range(steps.STEPS):
        rate = steps.RATE * (step + 1) * steps.RATIO
        gradient = {"w": jnp.array(steps.drawn("adagrad", step)[stack][index])}
        updates, kept = adagrad(rate, steps.DECAY).update(gradient, kept, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(alone.params[stack][0][index], params["w"], rtol=2e-5)


def test_what_is_written_beyond_the_rank_stays_zero(monkeypatch):
    jaxlora.register_optimizer("noise", noise)
    monkeypatch.setattr(steps, "NAMES", (*steps.NAMES, "noise"))
    monkeypatch.setitem(steps.RANKS, "noise", 2)
    state = steps.trained(("noise", "lion"))
    found = np.array(state.params["q.lora_b"][0])
    own = found[:, *steps.own("noise", "q.lora_b")]
    assert own.all()
    own[:] = 0
    assert not found.any()
    keys = state.optimizer_state["noise.key"]["q.lora_b"]
    assert keys.dtype == jnp.uint32 and keys.shape == (2, steps.LAYERS, 2)


def test_settings_of_a_job_are_those_of_the_function():
    jaxlora.register_optimizer("adagrad", adagrad)
    job = functools.partial(LoraJob, name="a", data=DataConfig(path="x"))
    found = find_optimizer(job(optimizer="adagrad"))
    args = {"eps": 1e-5}
    assert found.settings_of(job(optimizer="adagrad", optimizer_args=args)) == args
    with pytest.raises(ConfigError, match="'b1' is no setting of adagrad, which"):
        find_optimizer(job(optimizer="adagrad", optimizer_args={"b1": 0.5}))
    with pytest.raises(ConfigError, match=r"with jaxlora\.register_optimizer"):
        find_optimizer(job(optimizer="mine"))


def test_kept_programs_know_the_code_of_a_registered_optimizer():
    """Other mathematics or constants under the same name are another program."""

    def scaled(factor: float):
        table = np.full(1, factor, np.float32)  # a constant that is no literal
        scale = lambda g, params: jax.tree.map(lambda x: x * jnp.asarray(table), g)
        return lambda learning_rate, weight_decay: optax.stateless(scale)

    found = []
    for name, factor in (("one", 0.1), ("same", 0.1), ("other", 0.2)):
        jaxlora.register_optimizer(name, scaled(factor))
        found.append(OPTIMIZERS[name].fingerprint)
    assert found[0] == found[1] != found[2]


def start(params):
    return {}


def same(updates, state, params=None):
    return updates, state


def sized(params):
    return {name: jnp.zeros(weight.size) for name, weight in params.items()}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (optax.adamw(0.1), "and must be a function of learning_rate and"),
        (lambda rate: rate, r"the parameters \(rate\), and must begin with"),
        (lambda learning_rate, weight_decay, b1: None, "b1 of .* has no default"),
        (lambda learning_rate, weight_decay, b1="a": None, "b1 .* the default 'a'"),
        (lambda learning_rate, weight_decay: "adam", "returned a str, and must return"),
        (make(lambda params: {"step": 0}, same), r"has 0 at \['step'\], and must have"),
        (make(lambda params: {"key": jax.random.key(0)}, same), r"\['key'\], and must"),
        (make(start, lambda g, s, params=None: ({"x": g}, s)), "a step makes updates"),
        (make(start, lambda g, s, params=None: (g, {"x": g})), "a step makes state"),
        (
            lambda learning_rate, weight_decay: optax.sgd(float(learning_rate)),
            "fails when it is traced",
        ),
        (
            lambda learning_rate, weight_decay: optax.inject_hyperparams(optax.sgd)(
                learning_rate
            ),
            r"has a setting, at .*learning_rate.* and no optax.inject_hyperparams",
        ),
        (
            make(sized, same),
            r"shapes \(10,\) and \(15,\). An axis must be the rank",
        ),
    ],
)
def test_transformations_that_are_refused(function, message):
    with pytest.raises(ConfigError, match=f"optimizer 'mine': .*{message}"):
        jaxlora.register_optimizer("mine", function)
    assert OPTIMIZERS == BEFORE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lion", "'lion' is taken: there are adamw, schedule_free_adamw"),
        ("My-Own", "'My-Own' must be lower-case letters, digits and '_'"),
    ],
)
def test_names_that_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        jaxlora.register_optimizer(name, adagrad)
    assert OPTIMIZERS == BEFORE


def test_the_example_of_the_documentation_is_registered():
    text = registered.register_optimizer.__doc__
    lines = [line[8:] for line in text.splitlines() if line.startswith(" " * 8)]
    text = "\n".join(lines).split("job = ")[0]
    namespace = {"optax": optax, "jaxlora": jaxlora}
    exec(text, namespace)
    assert OPTIMIZERS["adagrad"].settings["eps"].default == 1e-7
