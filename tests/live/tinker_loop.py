"""Trains a model by the tinker client, and prints its loss after each step.

It runs in an environment of its own, with the client, and takes the name of the model
and the number of steps.
"""

import sys

import numpy as np
import tinker
from tinker import types

LEARNING = types.AdamParams(learning_rate=1e-2)


def datum(size: int, seed: int) -> types.Datum:
    tokens = np.random.default_rng(seed).integers(3, 250, size)
    inputs = {"target_tokens": tokens, "weights": np.ones(size, np.float32)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens.tolist()),
        loss_fn_inputs={k: types.TensorData.from_numpy(v) for k, v in inputs.items()},
    )


def main(name: str, num_steps: int) -> None:
    service = tinker.ServiceClient()
    model = service.create_lora_training_client(name, rank=4, seed=1).result()
    for step in range(num_steps):
        data = [datum(8, step % 4), datum(12, step % 3)]
        passed = model.forward_backward(data, "cross_entropy")
        stepped = model.optim_step(LEARNING)
        loss = passed.result().metrics["loss:sum"]
        assert stepped.result().metrics["step:max"] == step + 1
        print("step", step, repr(loss), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
