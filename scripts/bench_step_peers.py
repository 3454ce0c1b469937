"""The step benchmark's rows of transformers with peft: one adapter, the same tokens.

The adapter is bfloat16 like the base, which is the fastest that peft can be asked for.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxlora.data.tokenize import TokenizedSample
from jaxlora.models.families import FAMILIES
from scripts import bench_step_rows as rows
from scripts.bench_models import config_json
from scripts.bench_training import GIB, time_steps

if TYPE_CHECKING:
    import torch

IGNORED = -100  # a label that transformers' loss leaves out
_LINEARS = [row.name.rsplit(".", 1)[-1] for row in FAMILIES["llama"].linears]


@dataclasses.dataclass(frozen=True)
class Part:
    """What goes through the model at once.

    Attributes:
        inputs: Keyword arguments of the model, without labels.
        labels: The tokens themselves, where they are trained on.
        num_targets: Tokens that are trained on.
    """

    inputs: dict[str, Any]
    labels: "torch.Tensor"
    num_targets: int


def missing(row: "rows.Row") -> str | None:
    """Why the row cannot run here, or None."""
    needs = ["torch", "transformers", "peft"]
    if row.layout == "flash":
        needs.append("flash_attn")
    lacking = [name for name in needs if importlib.util.find_spec(name) is None]
    return f"{', '.join(lacking)} not installed" if lacking else None


def measure(case: "rows.Case", row: "rows.Row") -> dict[str, Any]:
    """What the row's columns hold, or `skipped`: why it cannot run."""
    reason = missing(row)
    if reason is not None:
        return {"skipped": reason}
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if row.layout == "flash" and device == "cpu":
        return {"skipped": "flash attention needs a GPU"}
    torch.manual_seed(0)
    model = _model(case, row, device)
    drawn = rows.microbatches(case, model.config.vocab_size)
    lay_out = _padded if row.layout == "padded" else _packed
    dtype = getattr(torch, case.dtype)
    batches = [lay_out(list(m.samples), row.layout, dtype, device) for m in drawn]
    step = _step(model, row, batches)

    def start() -> Callable[[], None]:
        step()
        if device == "cpu":
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = time_steps(start, case.repeats)
    cuda = device == "cuda"
    name = torch.cuda.get_device_name() if cuda else device
    found = rows.result(times, sum(m.num_tokens for m in drawn), name)
    peak = round(torch.cuda.max_memory_allocated() / GIB, 2) if cuda else None
    return found | {"peak_gib": peak, "program_gib": None}


def _model(case: "rows.Case", row: "rows.Row", device: str):
    import peft
    import torch
    import transformers

    fields = config_json(case.model, case.num_layers)
    kind = fields.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **fields)
    attention = "flash_attention_2" if row.layout == "flash" else "sdpa"
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, case.dtype),
            attn_implementation=attention,
        )
    model.config.use_cache = False
    if row.has_adapters:
        lora = peft.LoraConfig(
            r=case.rank,
            lora_alpha=32,
            lora_dropout=case.dropout,
            target_modules=_LINEARS,
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
        # peft makes adapters in float32 whatever the base is.
        model = model.to(getattr(torch, case.dtype))
    else:
        model.requires_grad_(False)
    if row.remat != "none":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    return model.train()


def _targets(samples: list[TokenizedSample]) -> int:
    return sum(int(s.is_target.sum()) for s in samples)


def _labels(sample: TokenizedSample):
    import torch

    labels = torch.tensor(sample.token_ids, dtype=torch.long)
    labels[~torch.tensor(sample.is_target)] = IGNORED
    return labels


def _packed(samples, layout: str, dtype, device: str) -> list[Part]:
    """All samples in one row; they see only themselves."""
    import torch

    ids = [torch.tensor(s.token_ids, dtype=torch.long) for s in samples]
    places = [torch.arange(len(s.token_ids)) for s in samples]
    inputs = {
        "input_ids": torch.cat(ids)[None].to(device),
        "position_ids": torch.cat(places)[None].to(device),
    }
    if layout == "packed":
        owner = torch.cat([torch.full_like(x, i) for i, x in enumerate(ids)])
        owner = owner.to(device)
        seen = (owner[:, None] == owner).tril()
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        mask.masked_fill_(~seen, torch.finfo(dtype).min)
        inputs["attention_mask"] = mask[None, None]
    labels = torch.cat([_labels(s) for s in samples])[None].to(device)
    return [Part(inputs, labels, _targets(samples))]


def _padded(samples, layout: str, dtype, device: str) -> list[Part]:
    """Sorted by length, four at a time, each group padded to its longest."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    del layout, dtype
    samples = sorted(samples, key=lambda s: len(s.token_ids))
    out = []
    for i in range(0, len(samples), 4):
        group = samples[i : i + 4]
        ids = [torch.tensor(s.token_ids, dtype=torch.long) for s in group]
        real = pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
        labels = pad_sequence(
            [_labels(s) for s in group], batch_first=True, padding_value=IGNORED
        )
        inputs = {
            "input_ids": pad_sequence(ids, batch_first=True).to(device),
            "attention_mask": real.to(device),
        }
        out.append(Part(inputs, labels.to(device), _targets(group)))
    return out


def _step(model, row: "rows.Row", batches: list[list[Part]]) -> Callable[[], None]:
    import torch

    total = sum(part.num_targets for batch in batches for part in batch)
    trained = [p for p in model.parameters() if p.requires_grad]
    fused = next(model.parameters()).device.type == "cuda"
    adamw = torch.optim.AdamW(trained, lr=1e-5, fused=fused) if trained else None

    def step() -> None:
        for part in (part for batch in batches for part in batch):
            inputs = dict(part.inputs)
            if adamw is None:
                # Backward through the base alone, down to its inputs.
                embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
                inputs["inputs_embeds"] = embedded.detach().requires_grad_()
            out = model(**inputs, labels=part.labels, use_cache=False)
            (out.loss * (part.num_targets / total)).backward()
        if adamw is not None:
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            adamw.step()
            adamw.zero_grad(set_to_none=True)

    return step
