"""Writes a cache of the Hugging Face hub with small data sets and a tokenizer.

It runs in the environment of the tinker client, and takes the folder of the cache,
which is HF_HOME, and a folder with a tokenizer.
"""

import json
import pathlib
import random
import shutil
import sys

import datasets

MODEL = "Qwen/Qwen3-8B-Base"
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
# What the recipe of reinforcement learning puts before each question.
PREFIX = (
    ("user", "How many r's are in strawberry?" + SUFFIX),
    (
        "assistant",
        "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w "
        "6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    ),
)


def put(home: pathlib.Path, name: str, config: str, splits: dict[str, list]) -> None:
    """Puts a data set into the cache as if it had been loaded from the hub."""
    own, built = name.rpartition("/")[2], home / "built" / name.replace("/", "_")
    built.mkdir(parents=True)
    for split, rows in splits.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (built / f"{split}.jsonl").write_text(lines)
    files = {split: str(built / f"{split}.jsonl") for split in splits}
    made = datasets.load_dataset("json", data_files=files, cache_dir=str(built / "c"))
    first = pathlib.Path(next(iter(made.values())).cache_files[0]["filename"])
    target = (
        home / "datasets" / name.replace("/", "___") / config / "0.0.0" / ("0" * 40)
    )
    shutil.copytree(first.parent, target)
    for file in target.glob("json-*.arrow"):
        file.rename(target / file.name.replace("json-", f"{own}-", 1))
    info = json.loads((target / "dataset_info.json").read_text())
    info |= {"builder_name": "json", "dataset_name": own, "config_name": config}
    for split in info["splits"].values():
        split["dataset_name"] = own
    (target / "dataset_info.json").write_text(json.dumps(info))


def main(home: pathlib.Path, tokenizer: pathlib.Path) -> None:
    rng = random.Random(0)
    sums = [(rng.randint(0, 4), rng.randint(0, 4)) for _ in range(160)]
    questions = [f"What is {a} plus {b}?" for a, b in sums]
    chats = [
        [
            *({"role": role, "content": text} for role, text in PREFIX),
            {"role": "user", "content": question + SUFFIX},
            {"role": "assistant", "content": f"\\boxed{{{rng.randint(0, 9)}}}"},
        ]
        for question in questions
    ]
    put(
        home,
        "HuggingFaceH4/no_robots",
        "default",
        {"train": [{"messages": chat} for chat in chats]},
    )
    answers = [
        {"question": question, "answer": f"#### {a + b}"}
        for question, (a, b) in zip(questions, sums, strict=True)
    ]
    put(home, "openai/gsm8k", "main", {"train": answers, "test": answers[:8]})
    pairs = [
        {
            "chosen": f"\n\nHuman: {question}\n\nAssistant: It is {a + b}, surely.",
            "rejected": f"\n\nHuman: {question}\n\nAssistant: no",
        }
        for question, (a, b) in zip(questions, sums, strict=True)
    ]
    put(home, "Anthropic/hh-rlhf", "default", {"train": pairs, "test": pairs[:8]})
    model = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    shutil.copytree(tokenizer, model / "snapshots" / "main")
    for weights in (model / "snapshots" / "main").glob("*.safetensors"):
        weights.unlink()
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("main")


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:]))
