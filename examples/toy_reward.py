"""Reinforcement learning in a loop of your own: sample, reward, step.

Two adapters share the model. Each is rewarded for another letter.

python examples/tiny_model.py
python examples/toy_reward.py
"""

import numpy as np

import jaxlora

session = jaxlora.Session("models/tiny", rank=8, microbatch_tokens=(256, 1024))
decode, letters = session.tokenizer.decode, {"one": "a", "other": "e"}
for name in letters:
    session.add_adapter(name)
prompts, rewards = ["Say something:", "A word, please:"], {name: [] for name in letters}
for step in range(12):
    calls = []
    for name, letter in letters.items():
        samples = session.sample(
            name, prompts, num_samples=8, max_new_tokens=12, temperature=1.0, seed=step
        )
        data, seen = [], []
        for group in samples:
            own = np.array([decode(one.tokens).count(letter) for one in group], float)
            seen.append(own.mean())
            data += [
                jaxlora.Datum.of(
                    one.prompt, one.tokens, logprobs=one.logprobs, advantages=advantage
                )
                for one, advantage in zip(group, own - own.mean(), strict=True)
            ]
        rewards[name].append(np.mean(seen))
        # Both adapters' datums share microbatches, each with a loss of its own.
        loss = "ppo" if name == "one" else "importance_sampling"
        calls.append(session.forward_backward(name, data, loss))
        calls.append(session.optim_step(name, learning_rate=1e-2))
    for call in calls:
        call.result()
    print(step, {name: f"{own[-1]:.2f}" for name, own in rewards.items()})
