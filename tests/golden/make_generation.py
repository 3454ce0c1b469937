"""Makes what transformers generates greedily with the tiny models of models/.

Run from the repository root after make_logits.py, where torch and transformers are
installed:

    python tests/golden/make_generation.py [NAME ...]

Each folder under models/ then holds generation.npz. The prompts are the first tokens of
the sequences in logits.npz, as many as `PROMPTS` says, in one batch:

    tokens (B, 32)      tokens that follow each prompt; the end of a sequence is ignored
    logits (B, V)       logits of the token after them
"""

import pathlib
import sys

import make_logits
import numpy as np
import torch
import transformers

NUM_TOKENS = 32
# Number of a sequence in logits.npz, and how many of its tokens are the prompt.
PROMPTS = ((0, 83), (0, 9), (1, 21), (1, 1))


@torch.no_grad()
def generate(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays of generation.npz."""
    golden = np.load(folder / "logits.npz")
    prompts = [golden[f"tokens_{i}"][:length] for i, length in PROMPTS]
    longest = max(map(len, prompts))
    ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, longest - len(prompt) :] = 1
    model = make_logits.load(folder)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NUM_TOKENS + 1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[:, longest : longest + NUM_TOKENS].numpy()
    return {"tokens": tokens.astype(np.int32), "logits": out.logits[-1].numpy()}


if __name__ == "__main__":
    transformers.logging.disable_progress_bar()
    for name in sys.argv[1:] or list(make_logits.CASES):
        place = make_logits.MODELS / name
        arrays = generate(place)
        np.savez(place / "generation.npz", **arrays)
        different = [len(set(row.tolist())) for row in arrays["tokens"]]
        print(f"{name}: {different} different tokens")
