"""Saves variants of LoRA of many shapes with peft, and the logits they give.

Run from the repository root, where torch, transformers and peft are installed, after
make_peft_run.py, whose base they adapt:

    python tests/golden/make_variant_folders.py

Each variant_folders/<name>/ is a PEFT folder as peft writes it, with random ranks,
targets and trained tensors. wanted.npz has tokens, the float32 logits of base and
adapter, by name, and for some folders the logits of the merged model.
"""

import pathlib
import random
import shutil

import numpy as np
import peft
import torch
import transformers
from make_peft_run import OUT as RUN
from make_peft_run import VOCAB, save, tie

OUT = pathlib.Path(__file__).parent / "variant_folders"
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NUM_DORA, NUM_VERA, NUM_PISSA, NUM_ROWS, NUM_BIAS = 24, 12, 8, 4, 2
NUM_HEADS, NUM_WHOLE = 3, 6


def random_settings(draw: random.Random) -> dict:
    """Settings in which adapters of one kind differ."""
    targets = draw.sample(LINEARS, draw.randint(1, 3))
    settings = {
        "r": draw.randint(1, 4),
        "lora_alpha": draw.choice([1, 3, 8, 16]),
        "use_rslora": draw.random() < 0.3,
        "lora_dropout": draw.choice([0.0, 0.1]),
        "target_modules": targets,
    }
    if draw.random() < 0.4:
        settings["layers_to_transform"] = [draw.randint(0, 1)]
    if draw.random() < 0.3:
        settings["rank_pattern"] = {targets[0]: draw.randint(1, 3)}
        settings["alpha_pattern"] = {targets[-1]: draw.choice([2, 5])}
    return settings


def base():
    return transformers.AutoModelForCausalLM.from_pretrained(
        RUN / "base", dtype=torch.float32, attn_implementation="eager"
    )


def logits_of(model, tokens) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=tokens[None]).logits[0].numpy()


def record(name: str, model, wanted: dict) -> None:
    """Computes the logits of an adapter, and those of its merged model."""
    model.eval()
    tokens = torch.randint(0, VOCAB, (8,))
    wanted[f"{name}.tokens"] = tokens.numpy().astype(np.int32)
    wanted[f"{name}.logits"] = logits_of(model, tokens)
    wanted[f"{name}.merged"] = logits_of(model.merge_and_unload(), tokens)


def make_dora(name: str, seed: int, wanted: dict) -> None:
    torch.manual_seed(seed)
    settings = random_settings(random.Random(seed))
    config = peft.LoraConfig(task_type="CAUSAL_LM", use_dora=True, **settings)
    model = peft.get_peft_model(base(), config)
    for key, weight in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(weight, std=0.2)
        if "magnitude" in key:
            weight.data *= torch.empty_like(weight).uniform_(0.6, 1.4)
    save(model, OUT / name)
    record(name, model, wanted)


def make_vera(name: str, seed: int, wanted: dict) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    layers = {"layers_to_transform": [draw.randint(0, 1)]}
    config = peft.VeraConfig(
        task_type="CAUSAL_LM",
        r=draw.randint(1, 8),
        target_modules=draw.sample(LINEARS, draw.randint(1, 4)),
        projection_prng_key=draw.choice([0, 1, draw.randrange(2**31)]),
        save_projection=draw.random() < 0.5,
        vera_dropout=draw.choice([0.0, 0.1]),
        d_initial=draw.choice([0.1, 1.0]),
        **(layers if draw.random() < 0.4 else {}),
    )
    model = peft.get_peft_model(base(), config)
    for key, weight in model.named_parameters():
        if "vera_lambda" in key:
            torch.nn.init.normal_(weight, std=0.5)
    save(model, OUT / name)
    record(name, model, wanted)


def make_pissa(name: str, seed: int, wanted: dict) -> None:
    """Saves an adapter of PiSSA as peft converts it, for the base as it was."""
    torch.manual_seed(seed)
    settings = random_settings(random.Random(seed))
    if settings["use_rslora"]:  # peft does not convert both together
        settings.pop("rank_pattern", None), settings.pop("alpha_pattern", None)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", init_lora_weights="pissa", **settings
    )
    model = peft.get_peft_model(base(), config)
    model.peft_config["default"].init_lora_weights = True
    save(model, OUT / "initial")
    for key, weight in model.named_parameters():
        if "lora_" in key:
            weight.data += 0.1 * torch.randn_like(weight)
    model.peft_config["default"].init_lora_weights = "pissa"
    initial = str(OUT / "initial")
    save(model, OUT / name, path_initial_model_for_weight_conversion=initial)
    shutil.rmtree(initial)
    record(name, model, wanted)


def biased_base():
    """The base with biases in attention; tests/golden_base.py makes the same."""
    model = base()
    for number, layer in enumerate(model.model.layers):
        for linear in ("q_proj", "k_proj", "v_proj", "o_proj"):
            module = getattr(layer.self_attn, linear)
            values = 0.3 * np.sin(np.arange(module.out_features) + number)
            module.bias = torch.nn.Parameter(torch.tensor(values, dtype=torch.float32))
    return model


def make_bias(name: str, seed: int, wanted: dict) -> None:
    """Saves LoRA with trained biases; the second one has DoRA, too."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        bias="lora_only",
        use_dora=bool(seed % 2),
        r=3,
        target_modules=["q_proj", "o_proj", "up_proj"],
    )
    model = peft.get_peft_model(biased_base(), config)
    for key, weight in model.named_parameters():
        if "lora_B" in key or (key.endswith("bias") and weight.requires_grad):
            torch.nn.init.normal_(weight, std=0.3)
    save(model, OUT / name)
    record(name, model, wanted)


def make_rows(name: str, seed: int, wanted: dict) -> None:
    """Saves trained rows of tokens; the head of odd ones is tied to the embedding."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    ids = draw.sample(range(VOCAB), draw.randint(1, 6))
    settings = random_settings(draw)
    model = base()
    if seed % 2:
        tie(model)
    given = ids if seed % 4 < 2 else {"embed_tokens": ids}
    save_rows(name, model, given, settings, ids, wanted)


def make_head_rows(name: str, seed: int, wanted: dict) -> None:
    """Saves trained rows of a head that is not tied; of odd ones, of it alone."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    ids = draw.sample(range(VOCAB), draw.randint(2, 6))
    given = {"lm_head": ids}
    if seed % 2 == 0:
        given["embed_tokens"] = ids[1:]
    save_rows(name, base(), given, random_settings(draw), ids, wanted)


def save_rows(name, model, given, settings: dict, ids: list[int], wanted: dict) -> None:
    """Saves an adapter with rows of tokens, of which some are in its input."""
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", trainable_token_indices=given, **settings
    )
    model = peft.get_peft_model(model, config)
    for key, weight in model.named_parameters():
        if "lora_B" in key or "tokens_delta" in key:
            torch.nn.init.normal_(weight, std=0.2)
    save(model, OUT / name)
    model.eval()
    tokens = torch.randint(0, VOCAB, (8,))
    tokens[1], tokens[5] = ids[0], ids[-1]
    wanted[f"{name}.tokens"] = tokens.numpy().astype(np.int32)
    wanted[f"{name}.logits"] = logits_of(model, tokens)
    wanted[f"{name}.merged"] = logits_of(model.merge_and_unload(), tokens)


def make_whole(name: str, seed: int, wanted: dict) -> None:
    """Saves whole copies of embedding and head; the head of odd ones was tied."""
    torch.manual_seed(seed)
    modules = (["embed_tokens", "lm_head"], ["embed_tokens"], ["lm_head"])[seed % 3]
    model = base()
    if seed % 2:
        tie(model)
    settings = random_settings(random.Random(seed)) | {"use_dora": seed % 4 == 0}
    config = peft.LoraConfig(task_type="CAUSAL_LM", modules_to_save=modules, **settings)
    model = peft.get_peft_model(model, config)
    for key, weight in model.named_parameters():
        if "lora_B" in key or "modules_to_save" in key:
            torch.nn.init.normal_(weight, std=0.2)
    save(model, OUT / name)
    record(name, model, wanted)


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    wanted: dict[str, np.ndarray] = {}
    for number in range(NUM_DORA):
        make_dora(f"dora{number:02}", number, wanted)
    for number in range(NUM_VERA):
        make_vera(f"vera{number:02}", 100 + number, wanted)
    for number in range(NUM_PISSA):
        make_pissa(f"pissa{number:02}", 200 + number, wanted)
    for number in range(NUM_ROWS):
        make_rows(f"rows{number:02}", 300 + number, wanted)
    for number in range(NUM_BIAS):
        make_bias(f"bias{number:02}", 400 + number, wanted)
    for number in range(NUM_HEADS):
        make_head_rows(f"heads{number:02}", 500 + number, wanted)
    for number in range(NUM_WHOLE):
        make_whole(f"whole{number:02}", 600 + number, wanted)
    np.savez_compressed(OUT / "wanted.npz", **wanted)
    for file in OUT.rglob("*.safetensors"):
        file.chmod(0o644)
