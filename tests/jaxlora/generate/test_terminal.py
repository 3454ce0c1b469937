"""A chat in the terminal."""

from jaxlora.config.generation_settings import GenerationSettings
from jaxlora.errors import ConfigError
from jaxlora.generate.generator import Generator
from jaxlora.generate.terminal import Chat


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
    """Returns what the chat wrote, the object, and the prompts that were sent."""
    written, waiting = [], iter(lines)

    def read(prompt):
        line = next(waiting, EOFError)
        if not isinstance(line, str):
            raise line
        return line

    echo = Echo()
    made = Chat(echo, GenerationSettings(), system=system, write=written.append)
    made.run(read)
    return "".join(written), made, echo.prompts


def test_the_conversation_grows_until_it_is_reset():
    _, made, prompts = chat("a", "b c", "/reset", "d", system="S")
    said = [[m["content"] for m in prompt.text] for prompt in prompts]
    assert said == [["S", "a"], ["S", "a", "a ", "b c"], ["S", "d"]]
    assert [m["role"] for m in made.messages] == ["system", "user", "assistant"]


def test_ctrl_c_stops_an_answer_which_stays_in_the_conversation():
    written, made, _ = chat("a b stop c", KeyboardInterrupt, "d")
    assert "a b \n" in written
    assert [m["content"] for m in made.messages] == ["a b stop c", "a b ", "d", "d "]


def test_an_error_leaves_the_conversation_as_it_was():
    written, made, _ = chat("fail", "a")
    assert "jaxlora: error: too long.\n" in written
    assert [m["content"] for m in made.messages] == ["a", "a "]


def test_the_adapter_can_be_changed():
    written, _, prompts = chat("a", "/adapter base", "b", "/adapter x", "/what")
    assert [prompt.adapter for prompt in prompts] == ["one", "base"]
    assert "There is no adapter 'x'; there are: base, one, two." in written
    assert written.count("/reset") == 2
