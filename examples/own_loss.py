"""A loss of your own, in a loop of your own: the better of two answers wins.

python examples/tiny_model.py
python examples/own_loss.py
"""

import jax
import jax.numpy as jnp

import jaxlora

session = jaxlora.Session("models/tiny", rank=8, microbatch_tokens=512)
session.add_adapter("mine")


def answered(question: str, answer: str) -> jaxlora.Datum:
    encode = session.tokenizer.encode
    return jaxlora.Datum.of(encode(question), encode(answer, add_special_tokens=False))


# A question, its better and its worse answer.
triples = [
    ("Do you sell rye bread?", " Yes, two kinds.", " No idea."),
    ("When do you open?", " At seven.", " Whenever."),
    ("Can I order a cake?", " Gladly, by phone.", " Ask somebody else."),
]
data = [answered(question, a) for question, *answers in triples for a in answers]


def worse_is_likelier(data, logprobs):
    """How much likelier, by token, the worse answer is than the better one."""
    pairs = zip(data, logprobs, strict=True)
    means = jnp.stack([(d.weights * lp).sum() / d.weights.sum() for d, lp in pairs])
    margins = means[0::2] - means[1::2]
    return jax.nn.softplus(-margins).sum(), {"margin:min": margins.min()}


losses = []
for step in range(8):
    done = session.forward_backward_custom("mine", data, worse_is_likelier).result()
    session.optim_step("mine", learning_rate=3e-3)
    losses.append(done.loss)
    print(step, done.metrics)
session.save("mine", "runs/own_loss/mine")  # a PEFT folder
