"""Steps of transformers + peft on a checkpoint, as a script of a user has them.

    python -m scripts.bench.run.peft_step CHECKPOINT DATA.jsonl [SAMPLES [STEPS]]

says `step ended` on stderr when an optimizer step of one adapter is done, the first one
by default. A batch is four samples of a file of prompts and completions, or as many as
are given, padded to the longest.
"""

import json
import sys


def main() -> None:
    """Runs the steps."""
    checkpoint, data, *given = sys.argv[1:]
    num_samples, num_steps = (*map(int, given), *(4, 1)[len(given) :])
    import peft
    import torch
    import transformers

    print("imported", file=sys.stderr, flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, device_map=device
    )
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    print("loaded", file=sys.stderr, flush=True)
    lora = peft.LoraConfig(
        r=16,
        lora_alpha=32,
        lora_dropout=0.1,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, lora).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-4)
    with open(data) as file:
        for _ in range(num_steps):
            records = [json.loads(next(file)) for _ in range(num_samples)]
            texts = [r["prompt"] + r["completion"] for r in records]
            batch = tokenizer(texts, return_tensors="pt", padding=True).to(device)
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            model(**inputs, labels=labels, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            adamw.step()
            adamw.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()
            print("step ended", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
