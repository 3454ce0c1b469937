"""Settings of jobs that are refused, and the forms in which they may be given."""

import pydantic
import pytest

from jaxlora import LoraJob
from jaxlora.adapters.optimizers.table import find_optimizer
from jaxlora.errors import ConfigError

VERA, ROWS = {"use_vera": True}, "trainable_token_indices"


def job(**settings) -> LoraJob:
    return LoraJob(name="a", data={"path": "x"}, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (VERA | {"use_dora": True}, "use_dora=True cannot be combined with use_vera"),
        (VERA | {"lora_alpha": 16}, "Leave lora_alpha out of this job"),
        (VERA | {"rank_pattern": {"q_proj": 2}}, "VeRA has one rank"),
        (VERA | {"init_lora_weights": "pissa"}, "nothing but its vectors to train"),
        ({"projection_prng_key": 1}, "set use_vera: true"),
        (VERA | {"projection_prng_key": 2**32}, "projection_prng_key"),
        (VERA | {"d_initial": 0}, "d_initial"),
        (VERA | {ROWS: [1]}, "cannot be combined with"),
        ({ROWS: [1, 2, 1]}, "token 1 occurs twice"),
        ({ROWS: {"wte": [1]}}, "not of wte"),
        ({ROWS: [-1]}, ROWS),
        ({"modules_to_save": ["norm"]}, "are trained as whole copies, not norm"),
        (
            {"modules_to_save": ["lm_head"], ROWS: {"lm_head": [1]}},
            "trains all rows of lm_head, and trainable_token_indices some of them",
        ),
        ({"optimizer": "nonsense"}, "optimizer='nonsense' must be one of adamw, "),
        ({"optimizer": "lion", "optimizer_args": {"b3": 0.5}}, "'b3' is no setting of"),
        ({"optimizer_args": {"b1": 0.5}}, "of adamw, where it is adam_b1"),
        ({"optimizer": "lion", "optimizer_args": {"b1": 1.0}}, "at least 0 and below"),
        ({"optimizer": "lion", "adam_b2": 0.5}, "and set b2 in optimizer_args"),
        ({"optimizer": "adamw_torch"}, "Set `optimizer: adamw`"),
        ({"optimizer": "lion", "adam_eps": 0.5}, "Leave it out"),
        ({"optimizer": "paged_adamw_8bit"}, "Set `optimizer: adamw`"),
        ({"optimizer": "muon", "init_lora_weights": "pissa"}, "take both for one mat"),
        (
            {"optimizer": "schedule_free_adamw"},
            "lr_schedule='cosine', and optimizer schedule_free_adamw .* constant`",
        ),
        (
            {"optimizer": "schedule_free_adamw", "adam_b1": 0.0},
            "adam_b1=0 must be above 0 and below 1",
        ),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises((ConfigError, pydantic.ValidationError), match=message):
        find_optimizer(job(**settings))


BOTH = {"embed_tokens": (67, 68), "lm_head": (71, 67)}
WHOLE = ("embed_tokens", "lm_head")


@pytest.mark.parametrize(
    ("setting", "given", "wanted"),
    [
        (ROWS, [3, 1], (3, 1)),
        (ROWS, {"embed_tokens": [3, 1]}, (3, 1)),
        (ROWS, BOTH, BOTH),
        (ROWS, {"lm_head": [3], "embed_tokens": []}, {"lm_head": (3,)}),
        (ROWS, {"lm_head": [], "embed_tokens": [3]}, (3,)),
        (ROWS, {"lm_head": []}, ()),
        (ROWS, {}, ()),
        ("modules_to_save", ["lm_head", "model.embed_tokens"], WHOLE),
        ("modules_to_save", "embed_tokens, lm_head", WHOLE),
        ("modules_to_save", WHOLE, WHOLE),
        ("lora_modules_to_save", None, ()),
        ("lora_modules_to_save", [], ()),
    ],
)
def test_forms_of_a_setting(setting, given, wanted):
    made = job(**{setting: given})
    assert getattr(made, setting.removeprefix("lora_")) == wanted
    assert LoraJob(**made.model_dump(mode="json")) == made
