"""Texts of a base model and of several adapters in one batch."""

import json

import numpy as np
import pytest

import jaxlora
from jaxlora import Generator, Prompt, load_model, merge_adapter
from jaxlora.errors import ConfigError
from jaxlora.generate.generator import end_ids
from jaxlora.generate.programs import programs_of
from jaxlora.generation_settings import GenerationSettings

LIVELY = GenerationSettings(max_new_tokens=12, temperature=2.0, top_p=0.95, seed=3)
TEXTS = ("ab", "a somewhat longer prompt", "x")


@pytest.fixture
def adapters(make_adapter):
    """Three adapters of different ranks, targets and scalings."""
    return {
        "one": make_adapter(("q_proj", "v_proj"), rank=4, seed=1),
        "two": make_adapter(("up_proj", "down_proj"), rank=2, seed=2),
        "three": make_adapter(rank=3, lora_alpha=2.0, seed=3, use_rslora=True),
    }


def asked(adapters):
    """Prompts for the base and every adapter, with seeds of their own."""
    return [
        Prompt(text, adapter=name, seed=7 * i + j)
        for i, name in enumerate(("base", *adapters))
        for j, text in enumerate(TEXTS[:2])
    ]


def test_an_adapter_generates_in_a_batch_what_it_generates_alone(model, adapters):
    prompts = asked(adapters)
    together = Generator(model, adapters).generate(prompts, LIVELY)
    assert len({out.token_ids for out in together}) == len(prompts)
    own = [prompt for prompt in prompts if prompt.adapter == "two"]
    alone = Generator(model, {"two": adapters["two"]}, batch_size=1)
    for out in alone.generate(own, LIVELY):
        other = together[prompts.index(out.prompt)]
        assert (out.text, out.token_ids) == (other.text, other.token_ids)
        np.testing.assert_allclose(out.logprobs, other.logprobs, atol=1e-4)


def test_neighbours_do_not_change_a_bit(model, adapters):
    generator, first = Generator(model, adapters), Prompt("ab", adapter="one", seed=5)
    others = [[Prompt("xyz", adapter="two")], [Prompt("hello", adapter="base", seed=9)]]
    outs = [generator.generate([first, *some], LIVELY)[0] for some in others]
    assert outs[0] == outs[1]


def test_another_seed_gives_another_sample_and_the_same_seed_the_same(model):
    prompts = [Prompt("ab", seed=seed) for seed in (1, 2, 1)]
    one, two, again = Generator(model).generate(prompts, LIVELY)
    assert one == again
    assert one.token_ids != two.token_ids


def test_an_adapter_generates_what_its_merged_model_generates(
    model, adapters, export, tiny_folder, tmp_path
):
    folder = export(adapters["three"])
    merge_adapter(tiny_folder, folder, tmp_path / "merged")
    merged = load_model(tmp_path / "merged", dtype="float32")
    given = jaxlora.generate(
        model, TEXTS, adapters={"three": folder}, max_new_tokens=12
    )
    wanted = jaxlora.generate(merged, TEXTS, max_new_tokens=12)
    assert [g.token_ids for g in given] == [w.token_ids for w in wanted]
    assert [g.prompt.adapter for g in given] == ["three"] * len(TEXTS)
    base = jaxlora.generate(model, TEXTS, max_new_tokens=12)
    assert [g.token_ids for g in given] != [b.token_ids for b in base]


def test_a_stop_text_ends_the_answer_whatever_the_steps(model):
    generator, prompt = Generator(model), Prompt("ab")
    (whole,) = generator.generate([prompt], LIVELY)
    stop = whole.text[5:7]
    settings = LIVELY.replace(stop=("no such text", stop))
    (out,) = generator.generate([prompt], settings)
    assert out.finish_reason == "stop_sequence"
    assert out.text == whole.text[: whole.text.index(stop)]
    assert out.token_ids == whole.token_ids[: len(out.token_ids)]
    assert "".join(generator.stream(prompt, settings)) == out.text
    assert "".join(generator.stream(prompt, LIVELY)) == whole.text


def test_a_token_of_generation_config_ends_the_answer(folder):
    (before,) = jaxlora.generate(folder, ["ab"], max_new_tokens=12)
    end = before.token_ids[-1]
    first = before.token_ids.index(end)
    config = {"eos_token_id": [2, end]}
    (folder / "generation_config.json").write_text(json.dumps(config))
    model = load_model(folder)
    assert end_ids(model, Generator(model)._text_decoder.tokenizer) == (2, end)
    (out,) = jaxlora.generate(model, ["ab"], max_new_tokens=12)
    assert out.finish_reason == "eos_token"
    assert out.token_ids == before.token_ids[: first + 1]
    assert out.text == before.text[:first]


def test_chats_go_through_the_chat_template(model):
    chat = [{"role": "user", "content": "ab"}]
    text = "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    out = Generator(model).generate([Prompt(chat), Prompt(text)], LIVELY)
    assert out[0].token_ids == out[1].token_ids
    (same,) = jaxlora.generate(model, ["ab"], chat=True, **LIVELY.model_dump())
    assert same.token_ids == out[0].token_ids


def test_prompts_and_answers_of_other_lengths_reuse_the_programs(model):
    generator = Generator(model, batch_size=2)
    programs = programs_of(generator._text_decoder.decoder.spec)
    generator.generate([Prompt(text) for text in TEXTS[:2]], LIVELY)
    before = programs.num_compilations()
    shorter = LIVELY.replace(max_new_tokens=5, temperature=1.0, top_p=0.5, seed=8)
    generator.generate(["pqr", "seventeen letters"], shorter)
    generator.generate(["a" * 32, "b"], shorter)
    assert programs.num_compilations() == before


def test_an_answer_ends_at_the_models_last_position(model):
    prompt = Prompt("a" * 510)
    (out,) = Generator(model).generate([prompt], LIVELY)
    assert (out.finish_reason, len(out.token_ids)) == ("length", 2)
    with pytest.raises(ConfigError, match=r"512 tokens.*positions for 512"):
        Generator(model).generate([Prompt("a" * 512)], LIVELY)


def test_wrong_input_is_refused_with_the_cure(model, make_adapter):
    generator = Generator(model, {"one": make_adapter()})
    with pytest.raises(ConfigError, match=r"'two'; there are: base, one\."):
        generator.generate([Prompt("ab", adapter="two")], LIVELY)
    with pytest.raises(ConfigError, match="a prompt is empty"):
        generator.generate([""], LIVELY)
    with pytest.raises(ConfigError, match="named 'base'"):
        Generator(model, {"base": make_adapter()})
    both = Generator(model, {"one": make_adapter(), "two": make_adapter()})
    with pytest.raises(ConfigError, match="names no adapter; there are: one, two"):
        both.stream("ab")
    with pytest.raises(ConfigError, match="Did you mean 'temperature'"):
        jaxlora.generate(model, ["ab"], temprature=1.0)
    with pytest.raises(ConfigError, match="stop holds an empty text"):
        jaxlora.generate(model, ["ab"], stop=["a", ""])
    with pytest.raises(ConfigError, match="batch_size=0"):
        jaxlora.generate(model, ["ab"], batch_size=0)
