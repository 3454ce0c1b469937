"""Chat templates that data name in place of the tokenizer's own."""

import re
from pathlib import Path

from jaxlora.data.tokenizer_files import read_template
from jaxlora.errors import DataError, ModelError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call | tojson }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}"
    "<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    "{% endif %}"
)
KNOWN = {"chatml": CHATML, "llama3": LLAMA3}
_IS_TEXT = re.compile(r"{{|{%")


def find_template(setting: str) -> str | dict[str, str]:
    """Returns the chat template that the setting `chat_template` means.

    Args:
        setting: The template itself, which has `{{` or `{%`; one of `KNOWN`; a file
            with a template; or the folder of a model, whose template is taken.

    Returns:
        The template, or several by name.

    Raises:
        DataError: There is no such template.
    """
    if _IS_TEXT.search(setting):
        return setting
    if setting in KNOWN:
        return KNOWN[setting]
    try:
        path = Path(setting).expanduser()
        template = read_template(path) if path.is_dir() else path.read_text("utf-8")
    except FileNotFoundError:
        raise DataError(
            f"chat_template {setting!r:.200} is neither a name "
            f"({', '.join(KNOWN)}) nor a file or folder (looked in {Path.cwd()}), and "
            "has no {{ of a template. Correct it."
        ) from None
    except (OSError, RuntimeError, ValueError, ModelError) as error:
        raise DataError(
            f"chat_template {setting!r:.200} cannot be read: {error}. Give a file with "
            "a template in UTF-8."
        ) from error
    if template is None:
        raise DataError(
            f"chat_template {setting!r:.200} is a folder without a chat template. Give "
            "the folder of an instruct model, or a file."
        )
    return template
