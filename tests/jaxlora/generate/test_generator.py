"""Texts of a base model and of several adapters in one batch."""

import dataclasses
import json
import threading

import jaxtyping
import numpy as np
import pytest

import jaxlora
from jaxlora import Generator, Prompt, load_model, merge_adapter
from jaxlora.adapters.adapter import Adapter, LoraWeights
from jaxlora.adapters.files.tokenizer_copy import TokenizerCopy
from jaxlora.config.generation_settings import GenerationSettings
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.errors import ConfigError, DataError, JaxloraError, ModelError
from jaxlora.generate.generator import end_ids
from jaxlora.generate.prompt import as_prompts, prompt_ids
from jaxlora.hf.load import OpenedModel
from jaxlora.modules.variants.dora import MAGNITUDE
from jaxlora.modules.variants.vera import VERA_B, VERA_D, VeraMatrices
from jaxlora.programs.program import Program

LIVELY = GenerationSettings(max_new_tokens=12, temperature=2.0, top_p=0.95, seed=3)
_SECONDS = 60.0  # a wait that is longer has failed
TEXTS = ("ab", "a somewhat longer prompt", "x")


@pytest.fixture
def adapters(make_small):
    """Three adapters of different ranks, targets and scalings."""
    return {
        "one": make_small(("q_proj", "v_proj"), rank=4, seed=1),
        "two": make_small(("up_proj", "down_proj"), rank=2, seed=2),
        "three": make_small(
            ("q_proj", "down_proj"), rank=3, lora_alpha=2.0, seed=3, use_rslora=True
        ),
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


def _vera(adapter: Adapter) -> Adapter:
    """VeRA on the same linears."""
    sizes = {n: (w.a.shape[0], w.b.shape[1]) for n, w in adapter.modules.items()}
    largest = (max(axis) for axis in zip(*sizes.values(), strict=True))
    modules = {}
    for name, (_, n) in sizes.items():
        rng = np.random.default_rng(n)
        shapes = {VERA_D.name: (5,), VERA_B.name: (n,)}
        tensors = {t: rng.normal(size=s).astype(np.float32) for t, s in shapes.items()}
        modules[name] = LoraWeights(tensors=tensors, rank=5, lora_alpha=5)
    return Adapter(modules=modules, vera=VeraMatrices(3, 5, *largest))


@pytest.mark.parametrize("kind", ["lora", "dora", "vera"])
def test_an_adapter_generates_what_its_merged_model_generates(
    model, adapters, export, tiny_folder, tmp_path, kind
):
    if kind == "vera":
        adapters = {"three": _vera(adapters["three"])}
    if kind == "dora":
        for weights in adapters["three"].modules.values():
            n = weights.b.shape[1]
            magnitude = np.random.default_rng(n).uniform(0.5, 2, n).astype(np.float32)
            weights.tensors[MAGNITUDE.name] = magnitude
    folder = export(adapters["three"], "three")
    merge_adapter(tiny_folder, folder, tmp_path / "merged")
    merged = load_model(tmp_path / "merged", dtype="float32")
    given = model.generate(TEXTS, adapters=[folder], max_new_tokens=12)
    wanted = jaxlora.generate(merged, TEXTS, max_new_tokens=12)
    assert [g.token_ids for g in given] == [w.token_ids for w in wanted]
    for one, other in zip(given, wanted, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
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
    (one,) = model.generate("ab", chat=True, **LIVELY.model_dump())
    assert one == same


@pytest.fixture
def unchecked(monkeypatch):
    """Types in signatures are not checked, as for a user."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


USER = {"role": "user", "content": "ab"}
CHAT = ({"role": "user", "content": "ab"},)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        (iter(["ab"]), ["ab"]),
        (np.array(["ab"]), ["ab"]),
        (Prompt("ab"), ["ab"]),
        ([USER], [CHAT]),
        (CHAT, [CHAT]),
        ([CHAT, "ab"], [CHAT, "ab"]),
        ([[{"from": "human", "value": "ab"}]], [CHAT]),
        ([{"role": "user", "content": [{"type": "text", "text": "ab"}]}], [CHAT]),
        ([{**USER, "weight": 0, "name": None}], [CHAT]),
        ([], []),
    ],
)
def test_one_prompt_or_several_in_every_form_of_the_data(given, texts):
    assert [prompt.text for prompt in as_prompts(given)] == texts


def test_a_conversation_may_have_empty_answers():
    """The model may have ended its answer at once."""
    chat = [USER, {"role": "assistant", "content": ""}, USER]
    assert Prompt(chat).text == tuple(chat)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, "the prompts are None"),
        (b"ab", "of type bytes"),
        (USER, "of type dict. Give a list"),
        ([3], "prompt 1: a prompt is 3, of type int"),
        (["ab", None], "prompt 2: a prompt is None"),
        (["a\ud800"], "prompt 1: the prompt holds half of a surrogate"),
        ([[]], r"prompt 1: field 'messages' is \[\], not a list of messages"),
        ([["ab"]], r"messages\[0\] is 'ab', not a message"),
        ([USER, "ab"], r"messages\[1\] is 'ab', not a message"),
        ([{"prompt": "ab"}], "not a message"),
        ([{"role": "user"}], r"messages\[0\].*content"),
        ([{**USER, "content": [{"type": "image"}]}], "a part of type 'image'"),
        ([USER, {"role": "assistant", "content": "c"}], "ends with a message of the"),
    ],
)
def test_what_is_no_prompt_is_refused(unchecked, given, text):
    with pytest.raises(JaxloraError, match=text):
        as_prompts(given)


def test_fields_of_a_prompt_are_checked(unchecked):
    seeds = [{"seed": seed} for seed in ("1", True, 2**31)]
    for options in (*seeds, {"adapter": 1}, {"tools": "clock"}):
        with pytest.raises(ConfigError, match="a prompt has"):
            Prompt("ab", **options)


def test_a_system_message_is_put_before_a_chat_that_has_none():
    chat = Prompt("ab").as_chat()
    assert chat.text == CHAT
    assert chat.as_chat() == chat
    assert chat.as_chat("S").text == ({"role": "system", "content": "S"}, *CHAT)
    with pytest.raises(ConfigError, match=r"has a system message \('S'\), and another"):
        chat.as_chat("S").as_chat("T")


def test_tools_go_to_the_chat_template(folder):
    prompt = Prompt(CHAT, tools=[{"name": "clock"}])
    with pytest.raises(DataError, match=r"the prompt 'ab' has tools, which"):
        prompt_ids(prompt, load_tokenizer(folder), 512)
    (folder / "chat_template.jinja").write_text(
        "{{ tools[0].name }}{{ messages[0].content }}"
    )
    tokenizer = load_tokenizer(folder)
    assert prompt_ids(prompt, tokenizer, 512) == tokenizer.encode("clockab")
    with pytest.raises(ConfigError, match="is no chat: set chat"):
        prompt_ids(Prompt("ab", tools=[{}]), tokenizer, 512)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(DataError, match=r"the prompt 'ab': the chat template"):
        prompt_ids(Prompt(CHAT), load_tokenizer(folder), 512)


def chats(generator) -> dict[str, str]:
    """The text of a chat by the base and by each adapter, before the answer."""
    decoder, found = generator._text_decoder, {}
    for name in ("base", *generator.adapters):
        request, _ = decoder._encode(Prompt(CHAT, adapter=name), LIVELY)
        found[name] = decoder.tokenizer.decode(request.token_ids)
    return found


def test_chats_have_the_template_kwargs_of_the_adapters_training(folder, adapters):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ mood }}")
    calm = {"chat_template_kwargs": {"mood": "calm"}}
    given = {"one": dataclasses.replace(adapters["one"], **calm)}
    given["two"] = adapters["two"]
    model = load_model(folder, dtype="float32")

    def texts(**options):
        return [*chats(Generator(model, given, **options)).values()]

    assert texts() == ["ab", "abcalm", "ab"]
    assert texts(chat_template_kwargs={"mood": "low"}) == ["ablow"] * 3
    assert texts(chat_template_kwargs={}) == ["ab"] * 3
    with pytest.raises(DataError, match="chat_template_kwargs has 'mod', which the ch"):
        texts(chat_template_kwargs={"mod": 1})
    with pytest.raises(DataError, match=r"of the training of 'one', .*kwargs=\{\} "):
        texts(chat_template="chatml")
    assert len(texts(chat_template="chatml", chat_template_kwargs={})) == 3


def test_prompts_and_answers_of_other_lengths_reuse_the_programs(model):
    generator = Generator(model, batch_size=2)
    programs = generator._text_decoder.decoder.programs
    functions = programs.prefill, programs.decode

    def num_compiled():
        return sum(len(function._prepared) for function in functions)

    generator.generate([Prompt(text) for text in TEXTS[:2]], LIVELY)
    before = num_compiled()
    shorter = LIVELY.replace(max_new_tokens=5, temperature=1.0, top_p=0.5, seed=8)
    generator.generate(["pqr", "seventeen letters"], shorter)
    generator.generate(["a" * 32, "b"], shorter)
    assert num_compiled() == before


def test_an_answer_ends_at_the_models_last_position(model):
    prompt = Prompt("a" * 510)
    (out,) = Generator(model).generate([prompt], LIVELY)
    assert (out.finish_reason, len(out.token_ids)) == ("length", 2)
    with pytest.raises(ConfigError, match=r"512 tokens.*positions for 512"):
        Generator(model).generate([Prompt("a" * 512)], LIVELY)


def test_wrong_input_is_refused_with_the_cure(model, make_small, unchecked):
    small = make_small()
    one = Generator(model, {"one": small})
    both = Generator(model, {"one": small, "two": small})

    def generate(**options):
        jaxlora.generate(model, ["ab"], **options)

    refused = [
        (
            lambda: one.generate(Prompt("ab", adapter="two")),
            r"'two'.* are: base, one\.",
        ),
        (lambda: one.generate([""], LIVELY), "a prompt is empty"),
        (lambda: one.generate("ab", {"temperature": 1.0}), "the settings are"),
        (lambda: both.stream("ab"), "names no adapter; there are: one, two"),
        (lambda: Generator(None), "the model is of type NoneType"),
        (lambda: Generator(model, {"base": small}), "named 'base'"),
        (lambda: Generator(model, ["a/base"]), "a/base is named 'base'"),
        (lambda: generate(temprature=1.0), "Did you mean 'temperature'"),
        (lambda: generate(stop=["a", ""]), "expected text that is not empty"),
        (lambda: generate(batch_size=0), "batch_size=0"),
        (lambda: generate(batch_size="4"), "batch_size='4'"),
        *(
            (lambda wrong=wrong: generate(adapters=wrong), "adapters")
            for wrong in ([small], {"a": 1}, {1: "a"}, 3)
        ),
    ]
    for call, text in refused:
        with pytest.raises(ConfigError, match=text):
            call()


def test_programs_are_prepared_while_the_base_is_loaded(tiny_folder, monkeypatch):
    """A generator of a folder has the texts of one of a loaded model."""
    begun, load, prepare = threading.Event(), OpenedModel.load, Program.prepare

    def loads(self, *args):
        assert begun.wait(_SECONDS)  # or programs would wait for the base
        return load(self, *args)

    def prepares(self, *args, **settings):
        if self.what == "prompts":
            begun.set()
        return prepare(self, *args, **settings)

    monkeypatch.setattr(OpenedModel, "load", loads)
    monkeypatch.setattr(Program, "prepare", prepares)
    generator = Generator(tiny_folder)
    settings = GenerationSettings(max_new_tokens=3)
    programs = generator._text_decoder.decoder.programs
    texts = generator.generate("abc", settings)
    assert begun.is_set()
    count = len(programs.prefill._prepared)
    loaded = Generator(generator.model)
    assert loaded._text_decoder.decoder.programs is programs
    assert loaded.generate("abc", settings) == texts
    assert len(programs.prefill._prepared) == count  # that of the shapes runs


def test_an_error_of_the_base_comes_before_the_text(tiny_folder, monkeypatch):
    def loads(self, *args):
        raise ModelError("a weight is not finite")

    monkeypatch.setattr(OpenedModel, "load", loads)
    generator = Generator(tiny_folder)
    with pytest.raises(ModelError, match="a weight is not finite"):
        generator.generate("abc", GenerationSettings(max_new_tokens=3))


def test_chats_have_the_template_beside_the_adapter(
    model, adapters, export, tiny_folder
):
    """Each adapter has its own; without one it has the base's, as the base has."""
    folders = {name: export(adapters["one"], name) for name in ("plain", "bare", "own")}
    own = TokenizerCopy(folder=tiny_folder, template="mine: {{ messages[0].content }}")
    own.write(folders["own"])
    (folders["bare"] / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    given = folders | {"job": adapters["one"], "other": adapters["two"]}
    templates = {"job": "run: {{ messages[0].content }}"}
    seen = chats(Generator(model, given, templates=templates))
    usual = seen.pop("base")
    assert seen == {
        **{"plain": usual, "other": usual, "bare": "ab!"},
        **{"own": "mine: ab", "job": "run: ab"},
    }
    asked = "x{{ messages[0].content }}"
    for_all = Generator(model, given, templates=templates, chat_template=asked)
    assert set(chats(for_all).values()) == {"xab"}


def test_an_adapter_ends_its_texts_as_its_tokenizer_says(
    model, adapters, export, tiny_folder
):
    """Other adapters and the base in the same call end theirs as before."""
    folder = export(adapters["one"], "one")
    TokenizerCopy(folder=tiny_folder).write(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"eos_token": "<|im_start|>"}
    path.write_text(json.dumps(config))
    decoder = Generator(model, {"one": folder, "two": adapters["two"]})._text_decoder
    assert decoder.own.keys() == {"one"}
    added = set(decoder.own["one"][1]) - set(decoder.end_ids)
    assert added == {decoder.tokenizer.bos_id}
