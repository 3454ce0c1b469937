"""A chat in the terminal."""

from jaxlora.config.generation_settings import GenerationSettings
from jaxlora.errors import ConfigError
from jaxlora.generate import terminal
from jaxlora.generate.generator import Generator


class Echo(Generator):
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


def chat(*lines, system=None):
    """Returns what the chat wrote, the conversation, and the prompts that were sent."""
    written, waiting = [], iter(lines)

    def read(prompt):
        line = next(waiting, EOFError)
        if not isinstance(line, str):
            raise line
        return line

    echo = Echo()
    messages = terminal.chat(
        echo, GenerationSettings(), system=system, read=read, write=written.append
    )
    return "".join(written), messages, echo.prompts


def test_the_conversation_grows():
    _, messages, prompts = chat("a", "b c", system="S")
    said = [[m["content"] for m in prompt.text] for prompt in prompts]
    assert said == [["S", "a"], ["S", "a", "a ", "b c"]]
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [m["role"] for m in messages] == roles


def test_ctrl_c_stops_an_answer_which_stays_in_the_conversation():
    written, messages, _ = chat("a b stop c", KeyboardInterrupt, "d")
    assert "a b \n" in written
    assert [m["content"] for m in messages] == ["a b stop c", "a b ", "d", "d "]


def test_an_error_leaves_the_conversation_as_it_was():
    written, messages, _ = chat("fail", "a")
    assert "jaxlora: error: too long.\n" in written
    assert [m["content"] for m in messages] == ["a", "a "]


def test_the_adapter_can_be_changed():
    written, _, prompts = chat("a", "/adapter base", "b", "/adapter x")
    assert [prompt.adapter for prompt in prompts] == ["one", "base"]
    assert "There is no adapter 'x'; there are: base, one, two." in written
