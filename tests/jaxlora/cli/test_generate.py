"""`jaxlora generate`."""

import json

import pytest

from jaxlora import Generation, Prompt
from jaxlora.cli import generate
from jaxlora.cli.main import main
from jaxlora.errors import ConfigError
from jaxlora.generate.adapters import named_folders
from jaxlora.generate.prompt_file import read_prompts
from jaxlora.generate.write import describe


def run(capsys, *words):
    """Returns the exit status, and what was printed on both streams."""
    status = main(["generate", *map(str, words)])
    return status, *capsys.readouterr()


def test_prompts_of_a_file_go_to_every_adapter(
    folder, export, make_adapter, tmp_path, capsys
):
    one = export(make_adapter(seed=1), "one")
    other = export(make_adapter(seed=2), "two")
    prompts = tmp_path / "prompts.jsonl"
    records = [{"prompt": "ab", "completion": "-"}, {"prompt": "c", "adapter": "base"}]
    prompts.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    options = "--max-new-tokens", 4, "--temperature", 1.5, "--top-p", 0.9, "--seed", 3
    adapters = "--adapter", one, "--adapter", f"other={other}"
    out = tmp_path / "out.jsonl"
    status, printed, _ = run(
        capsys, folder, *adapters, "--prompts", prompts, "--output", out, *options
    )
    made = [json.loads(line) for line in out.read_text().splitlines()]
    asked = [("ab", "one"), ("ab", "other"), ("c", "base")]
    assert status == 0
    assert [(m["prompt"], m["adapter"]) for m in made] == asked
    assert all(len(m["token_ids"]) == len(m["logprobs"]) == 4 for m in made)
    assert all(f"[{name}] {text}\n" in printed for text, name in asked)


class Echo:
    """Stands in for a `Generator`: repeats the last message, word by word."""

    adapters = ("one", "two")

    def __init__(self):
        self.prompts = []

    def stream(self, prompt, settings):
        self.prompts.append(prompt)
        text = prompt.text[-1]["content"]
        if text == "fail":
            raise ConfigError("too long.")
        for word in text.split():
            if word == "stop":
                raise KeyboardInterrupt
            yield word + " "


@pytest.fixture
def echo(monkeypatch):
    found = Echo()
    monkeypatch.setattr(generate, "_generator", lambda arguments: found)
    return found


@pytest.fixture
def typed(monkeypatch):
    """Types some lines, and then Ctrl-D; an exception stands for its key."""

    def types(*lines):
        waiting = iter(lines)

        def read(prompt):
            line = next(waiting, EOFError)
            if not isinstance(line, str):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)

    return types


@pytest.mark.parametrize(
    ("lines", "system", "said", "written"),
    [
        (("a", "b c"), "S", ["S", "a", "a ", "b c"], "b c \n"),
        (("a b stop c", KeyboardInterrupt, "d"), None, ["a b stop c", "a b ", "d"], ""),
        (("fail", "a"), None, ["a"], "jaxlora: error: too long.\n"),
    ],
    ids=["grows", "stopped", "failed"],
)
def test_the_conversation_of_a_chat(capsys, echo, typed, lines, system, said, written):
    """It grows by each answer, of which a part counts, but not by an error."""
    typed(*lines)
    options = () if system is None else ("--system", system)
    status, printed, _ = run(capsys, "m", "-i", *options)
    assert status == 0 and written in printed
    *_, last = echo.prompts
    assert [m["content"] for m in last.text] == said
    roles = ["user", "assistant", "user"][: len(said)]
    assert [m["role"] for m in last.text if m["role"] != "system"] == roles


def test_the_adapter_of_a_chat_can_be_changed(capsys, echo, typed):
    typed("a", "/adapter base", "b", "/adapter x")
    _, printed, _ = run(capsys, "m", "-i")
    assert [prompt.adapter for prompt in echo.prompts] == ["one", "base"]
    assert "There is no adapter 'x'; there are: base, one, two." in printed


def test_a_chat_with_a_model(folder, typed, capsys):
    typed("hello", "/adapter nobody", "/reset", "", "what")
    status, printed, _ = run(capsys, folder, "-i", "--max-new-tokens", "5")
    assert status == 0
    assert "There is no adapter 'nobody'; there are: base." in printed
    assert "Ctrl-D leaves" in printed


@pytest.mark.parametrize("kind", ["same", "soft", "hard", "relative", "of adapter"])
def test_an_output_that_is_read_is_refused(folder, tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("ab\n")
    (tmp_path / "adapter").mkdir()
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text("{}")
    if kind == "soft":
        out.symlink_to(prompts)
    elif kind == "hard":
        out.hardlink_to(prompts)
    else:
        out = {"same": prompts, "relative": "adapter/../prompts.txt"}.get(kind, config)
    words = folder, "--adapter", "a=adapter", "--prompts", prompts, "--output", out
    status, _, errors = run(capsys, *words)
    assert status == 1 and "would be replaced, and it is read as" in errors
    assert prompts.read_text() == "ab\n" and config.read_text() == "{}"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--prompt", "a"], "name a model, or --run"),
        (["m", "--job", "a", "--prompt", "a"], "--job a needs --run"),
        (["--run", "r", "--quantize", "nf4", "--prompt", "a"], "--quantize cannot be"),
        (["m", "--system", "a", "--prompt", "a"], "add --chat"),
        (["m", "--chat-template", "chatml", "--prompt", "a"], "add --chat"),
        (["m", "--chat-template-kwargs", "{a: 1}", "--prompt", "a"], "add --chat"),
        (["m", "--chat-template", "no", "--prompt", "a"], "'no' is neither a name"),
        (
            ["m", "--chat-template-kwargs", "{tools: 1}", "--prompt", "a"],
            "--chat-template-kwargs: 'tools' is given to chat templates by the program",
        ),
        (["m", "--prompt", "a", "--top-p", "2"], "top_p: must be less than"),
        (["m", "--prompt", "a", "--stop", ""], "expected text that is not empty"),
        (["m", "-i", "--output", "a.jsonl"], "--output is for --prompt and --prompts"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(capsys, words, text):
    status, _, errors = run(capsys, *words)
    assert status == 1
    assert text in errors


def test_adapters_are_named_by_their_folders(tmp_path):
    assert named_folders(["a/b/", "x=a/b", "c"]) == {"b": "a/b/", "x": "a/b", "c": "c"}
    with pytest.raises(ValueError, match="two adapters are named 'b': a/b and c/b"):
        named_folders(["a/b", "c/b"])
    with pytest.raises(ValueError, match=r"a/base is named 'base'.*NAME=FOLDER"):
        named_folders(["a/base"])
    folder = tmp_path / "lr=1" / "b"
    folder.mkdir(parents=True)
    assert named_folders([f"{folder}"]) == {"b": f"{folder}"}
    assert named_folders([f"x={folder}"]) == {"x": f"{folder}"}


def test_prompts_of_a_text_file_are_its_lines(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n two \n")
    assert read_prompts(path) == [Prompt("one"), Prompt(" two ")]
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(path)


ASK, ANSWER, SYSTEM = (
    {"role": role, "content": role[:3]} for role in ("user", "assistant", "system")
)
SPOKEN = [{"from": "human", "value": "use"}, {"from": "gpt", "value": "-"}]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"prompt": "a", "completion": "-"}, "a"),
        ({"prompt": [ASK], "completion": [ANSWER]}, (ASK,)),
        ({"messages": [ASK, ANSWER]}, (ASK,)),
        ({"messages": [SYSTEM, ASK, ANSWER, ASK]}, (SYSTEM, ASK, ANSWER, ASK)),
        ({"messages": [SYSTEM, ASK, ANSWER, ANSWER]}, (SYSTEM, ASK)),
        ({"conversations": SPOKEN, "messages": None}, (ASK,)),
        ({"instruction": "a", "input": "b", "output": "-"}, "a\nb"),
        ({"instruction": "a"}, "a"),
    ],
)
def test_training_records_are_prompts(tmp_path, record, text):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert read_prompts(path, chat=True) == [Prompt(text)]


def test_answers_left_out_are_counted(tmp_path, caplog):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"messages": [ASK, ANSWER]}, {"messages": [ASK]}]))
    with caplog.at_level("INFO"):
        assert read_prompts(path) == [Prompt([ASK])] * 2
    assert "1 of 2 chats end with messages of the assistant" in caplog.text


@pytest.mark.parametrize("num_digits", [20, 5000])
def test_a_seed_of_many_digits_is_refused(tmp_path, num_digits):
    path = tmp_path / "prompts.csv"
    path.write_text(f"prompt,seed\na,{'9' * num_digits}\n")
    with pytest.raises(ValueError, match=r"record 1: seed is '999.*write an integer"):
        read_prompts(path)
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a", "seed": {"9" * num_digits}}}')
    with pytest.raises(ValueError, match=r"record 1|line 1"):
        read_prompts(path)


def test_records_of_other_files(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_text("prompt,adapter,seed\na,one,3\nb,,\n")
    assert read_prompts(path) == [Prompt("a", adapter="one", seed=3), Prompt("b")]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"instruction": "a", "tools": '[{"name": "f"}]'}))
    (prompt,) = read_prompts(path)
    assert str(prompt.text).startswith("Below is an instruction")
    assert prompt.tools == [{"name": "f"}]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "line 1: is not valid JSON"),
        ("3", "holds a number, not an object"),
        ('{"text": "a"}', "record 1: has the fields text, and exactly one of prompt"),
        ('{"prompt": "a", "messages": []}', "exactly one of prompt, messages"),
        ('{"prompt": 3}', "prompt is 3; write a text"),
        ('{"prompt": ["a"]}', r"messages\[0\] is 'a', not a message"),
        ('{"messages": []}', r"record 1: field 'messages' is \[\]"),
        ('{"messages": "a"}', "messages is 'a'; write a list of messages"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "nothing to answer"),
        ('{"prompt": "a", "seed": true}', "seed is True"),
        ('{"prompt": "a", "adapter": 3}', "adapter is 3"),
        ('{"prompt": "a", "seed": -1}', "record 1: .*seed=-1"),
    ],
)
def test_a_wrong_record_is_named(tmp_path, line, text):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=text):
        read_prompts(path)


def test_the_last_message_of_a_chat_is_printed():
    prompt = Prompt("hello", adapter="one").as_chat("be kind")
    assert [m["role"] for m in prompt.text] == ["system", "user"]
    made = Generation(
        prompt=prompt, text="hi", token_ids=(), logprobs=(), finish_reason="length"
    )
    assert describe(made) == "[one] hello\nhi\n"
