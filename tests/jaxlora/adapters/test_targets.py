"""Which linears a job adapts, by PEFT's rules, and typing errors that are caught."""

import pytest

from jaxlora.adapters.targets import pattern_value, resolve_targets
from jaxlora.config import DataConfig, LoraJob
from jaxlora.errors import ConfigError
from jaxlora.models.registry import model_config
from jaxlora.models.structure import chosen_experts, linear_names
from tests import tiny

# Twelve layers, so that 1 is the beginning of 10 and the end of 11.
NAMES = linear_names(model_config({**tiny.CONFIG, "num_hidden_layers": 12}))


def resolve(**options):
    options = {"target_modules": ["q_proj", "v_proj"], **options}
    job = LoraJob(name="a", data=DataConfig(path="a.jsonl"), **options)
    return resolve_targets(job, NAMES)


def ending(*ends):
    return [name for name in NAMES if name.endswith(ends)]


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        ("all-linear", list(NAMES)),
        ("All-Linear", list(NAMES)),
        (["q_proj"], ending(".q_proj")),
        (["v_proj", "q_proj"], ending(".q_proj", ".v_proj")),
        (["self_attn.q_proj"], ending(".q_proj")),
        (["layers.1.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]),
        (["1.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]),
        (["model.layers.1.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]),
        (r".*\.[01]\.mlp\.(up|down)_proj", [n for n in NAMES if "mlp" in n][:6]),
        (r"model\.layers\.1\.mlp\.up_proj", ["model.layers.1.mlp.up_proj"]),
    ],
)
def test_targets(targets, chosen):
    found = resolve(target_modules=targets)
    if "(up|down)" in targets:
        chosen = [name for name in chosen if not name.endswith("gate_proj")]
    assert list(found) == chosen
    assert chosen


def test_targets_come_in_the_models_order():
    found = list(resolve(target_modules=["down_proj", "q_proj"]))
    assert found == [name for name in NAMES if name in set(found)]


def test_a_list_holds_no_regular_expressions():
    with pytest.raises(ConfigError, match=r"entry '\.\*q_proj' matches no linear"):
        resolve(target_modules=[".*q_proj"])


@pytest.mark.parametrize(
    "exclude",
    [["layers.0.self_attn.q_proj"], r"model\.layers\.0\.self_attn\.q_proj"],
)
def test_exclude_has_the_last_word(exclude):
    found = resolve(exclude_modules=exclude)
    assert list(found) == ending(".q_proj", ".v_proj")[1:]


def test_an_excluded_head_is_not_asked_for():
    found = resolve(
        target_modules=".*(q_proj|lm_head)",
        exclude_modules=["lm_head", "layers.0.self_attn.q_proj"],
    )
    assert list(found) == ending(".q_proj")[1:]
    found = resolve(target_modules="all-linear", exclude_modules=["lm_head"])
    assert list(found) == list(NAMES)


def test_rank_alpha_and_scaling():
    found = resolve(rank=8, lora_alpha=24.0)
    assert {(m.rank, m.lora_alpha, m.scaling) for m in found.values()} == {(8, 24, 3)}
    found = resolve(rank=16, lora_alpha=24.0, use_rslora=True)
    assert {m.scaling for m in found.values()} == {6.0}


def test_patterns_set_rank_and_alpha_of_the_names_they_end():
    found = resolve(
        rank=8,
        lora_alpha=16.0,
        rank_pattern={"layers.1.self_attn.q_proj": 2, "v_proj": 4},
        alpha_pattern={r"layers\.[01]\..*": 4.0},
    )
    of = {name.removeprefix("model.layers."): m for name, m in found.items()}
    assert (of["1.self_attn.q_proj"].rank, of["11.self_attn.q_proj"].rank) == (2, 8)
    assert {m.rank for name, m in of.items() if name.endswith("v_proj")} == {4}
    alphas = {name.split(".")[0]: m.lora_alpha for name, m in of.items()}
    assert {layer for layer, alpha in alphas.items() if alpha == 4.0} == {"0", "1"}
    # alpha of the pattern over rank of the pattern.
    assert of["1.self_attn.q_proj"].scaling == 4 / 2
    assert of["0.self_attn.q_proj"].scaling == 4 / 8
    assert of["2.self_attn.v_proj"].scaling == 16 / 4


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        ({"q_proj": 1, "self_attn.q_proj": 2}, 1),
        ({"self_attn.q_proj": 2, "q_proj": 1}, 2),
        ({"proj": 1}, 0),
        ({"_proj": 1}, 0),
        ({".*_proj": 1}, 1),
        ({"q_proj.*": 1}, 1),
        ({"model.layers": 1}, 0),
        ({"^layers.0.self_attn.q_proj": 1}, 0),
        ({"^model.layers.0.self_attn.q_proj": 1}, 1),
        ({"k_proj|q_proj": 1}, 1),
        ({}, 0),
    ],
)
def test_the_first_pattern_that_ends_the_name_counts(pattern, value):
    assert pattern_value(pattern, "model.layers.0.self_attn.q_proj", 0) == value


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"target_modules": ["q_prj"]},
            r"job 'a': target_modules entry 'q_prj' matches no linear of the model\. "
            r"Did you mean 'q_proj'\? There are: q_proj, k_proj",
        ),
        (
            {"target_modules": ["q_proj", "query_key_value"]},
            r"'query_key_value' matches no linear of the model\. There are: q_proj",
        ),
        (
            {"target_modules": "q_proj"},
            r"target_modules='q_proj' matches no linear of the model\. A string is a "
            r"regular expression for the whole name, .* suffixes go in a list",
        ),
        (
            {"target_modules": "(q_proj"},
            r"target_modules '\(q_proj' is not a valid regular",
        ),
        (
            {"target_modules": ["q_proj", "lm_head"]},
            "names 'lm_head', which matches lm",
        ),
        ({"target_modules": "lm_head"}, "the head beside them, set modules_to_save"),
        (
            {"target_modules": ".*(q_proj|lm_head)"},
            r"names '\.\*\(q_proj\|lm_head\)', which matches lm_head\. Adapters go",
        ),
        ({"target_modules": r".*_tokens|.*q_proj"}, "which matches model.embed_tokens"),
        (
            {"exclude_modules": ["layers.0.self_attn.q_proj", "v_prj"]},
            r"exclude_modules entry 'v_prj' matches no linear .* mean 'v_proj'\?",
        ),
        ({"exclude_modules": ["k_proj"]}, "excludes nothing of the 24 targets"),
        ({"exclude_modules": ".*"}, "excludes everything of the 24 targets"),
        (
            {"rank_pattern": {"k_proj": 4}},
            "rank_pattern key 'k_proj' matches none of the job's targets: q_proj, v_p",
        ),
        ({"alpha_pattern": {"k_proj": 4}}, "alpha_pattern key 'k_proj' matches none"),
        (
            {"target_modules": "(.|[a-z]|[^!])*[!?]"},
            r"job 'a': '\(\.\|\[a-z\]\|.*takes longer than 1 s to match",
        ),
        ({"target_modules": "(([a-z_.0-9])+)+!"}, "matches no linear of the model"),
        (
            {"rank_pattern": {"(?i)Q_PROJ": 4}},
            r"'\(\?i\)Q_PROJ' is not a valid regular expre",
        ),
    ],
)
def test_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        resolve(**options)


@pytest.mark.parametrize("layers", [1, [1], [11, 0]])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "up_proj"]])
def test_layers(layers, targets):
    numbers = [layers] if isinstance(layers, int) else layers
    found = list(resolve(target_modules=targets, layers_to_transform=layers))
    whole = resolve(target_modules=targets)
    assert found == [n for n in whole if int(n.split(".")[2]) in numbers]
    same = {"layers_to_transform": layers, "layers_pattern": "layers"}
    assert list(resolve(target_modules=targets, **same)) == found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers_to_transform": 12}, "has 12, and the model's layers are 0 to 11"),
        ({"layers_to_transform": -1}, "greater than or equal to 0"),
        ({"layers_pattern": "layers"}, "set that, or leave both out"),
        ({"layers_to_transform": 1, "layers_pattern": "h"}, "does not match the name"),
        (
            {"layers_to_transform": 1, "target_modules": ".*q_proj"},
            "a regular expression selects them by itself",
        ),
        (
            {"layers_to_transform": 1, "target_modules": ["layers.0.mlp.up_proj"]},
            r"in no layer of layers_to_transform=\[1\]",
        ),
    ],
)
def test_layers_that_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        resolve(**options)


MIXTURE = model_config(
    {
        **tiny.CONFIG,
        "model_type": "qwen2_moe",
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    }
)
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def resolve_mixture(**options):
    job = LoraJob(name="a", data=DataConfig(path="a.jsonl"), **options)
    names = linear_names(MIXTURE)
    return resolve_targets(job, names, chosen_experts=chosen_experts(MIXTURE))


@pytest.mark.parametrize(
    ("options", "rank", "scaling"),
    [
        ({"rank": 16, "lora_alpha": 8}, 5, 0.5),
        ({"rank": 2, "lora_alpha": 8}, 1, 4),
        ({"rank": 16, "lora_alpha": 8, "expert_rank": "full"}, 16, 0.5),
        ({"rank": 16, "lora_alpha": 8, "expert_rank": 7}, 7, 0.5),
        ({"rank": 16, "lora_alpha": 8, "use_rslora": True}, 5, 2),
        ({"rank": 16, "lora_alpha": 8, "rank_pattern": {"experts.*": 4}}, 4, 2),
    ],
)
def test_rank_of_experts(options, rank, scaling):
    """It is smaller, as a token passes some of them; the scaling stays."""
    modules = resolve_mixture(**options)
    expert = modules["model.layers.1.mlp.experts.4.down_proj"]
    assert expert.rank == rank
    assert expert.scaling == pytest.approx(scaling)
    for other in ("self_attn.q_proj", "mlp.shared_expert.up_proj"):
        assert modules[f"model.layers.0.{other}"].rank == options["rank"]


def test_parameters_of_experts():
    def kinds(**options):
        found = resolve_mixture(**options)
        return {name.partition(".layers.")[2] for name in found}

    def experts(layers, *linears):
        return {
            f"{i}.mlp.experts.{e}.{x}_proj"
            for i in layers
            for e in range(5)
            for x in linears
        }

    both = range(MIXTURE.num_layers)
    down = experts(both, "down")
    assert kinds(target_modules=[], target_parameters=[DOWN]) == down
    named = {"target_parameters": [f"model.layers.1.{GATE_UP}", "experts.down_proj"]}
    some = experts([1], "gate", "up") | down
    assert kinds(target_modules=[], **named) == some
    queries = {f"{i}.self_attn.q_proj" for i in both}
    assert kinds(target_modules=["q_proj"], **named) == queries | some
    attention = kinds(target_modules=r".*self_attn.*")
    assert not any("experts" in name for name in attention)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"target_modules": r".*experts\.[12]\..*"}, "only some are adapted"),
        ({"rank_pattern": {"experts.3.up_proj": 2}}, "differ in rank or alpha"),
        ({"use_dora": True}, "use_dora=True and adapts .* experts take LoRA only"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa and adapts"),
        ({"init_lora_weights": "orthogonal"}, "even ranks, and that of experts is 5"),
        ({"target_parameters": ["experts.w1"]}, "'experts.w1' matches no linear"),
        (
            {"target_modules": ["w1", "w3"]},
            "w1, w2 and w3 are gate_proj, down_pr",
        ),
        ({"target_modules": ["mlp.gate"]}, "Routers and gates of experts stay frozen"),
        ({"rank_pattern": {"experts.up_proj": 2}}, "Experts have a number, as in mod"),
        ({"exclude_modules": ["experts"]}, r"expression '\.\*experts\.\*' matches all"),
    ],
)
def test_experts_that_are_refused(options, error):
    with pytest.raises(ConfigError, match=error):
        resolve_mixture(**options)


def test_a_model_without_experts_has_no_parameters_of_them():
    with pytest.raises(ConfigError, match="the model has no experts"):
        resolve(target_parameters=[DOWN])
