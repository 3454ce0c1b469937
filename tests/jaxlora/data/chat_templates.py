"""Chat templates of real models, in three styles, and what tests do with them."""

import datetime

from jaxlora.data.templates.chat import ModelChat
from jaxlora.data.tokens.marked_text import mark, marked_parts

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' "
    "%}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
    "Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CHATML = """\
{% for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model supports one tool-call at once!") }}
        {%- endif %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- message.tool_calls[0].function | tojson }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' \
+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate "
    "user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' "
    "%}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == "
    "'assistant' %}{{ message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}"
    "{% endif %}{% endfor %}"
)

# Marks what the assistant writes, as transformers' `return_assistant_tokens_mask` asks.
GENERATION = """\
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content ~ '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Behaves as Qwen3: thoughts only after the last question, an empty thought in the last
# answer, tool calls and results as tagged JSON, results in a row in one user's turn.
QWEN3 = """\
{%- macro call(c) -%}
    {%- set f = c.function or c -%}
    {{- '<tool_call>\\n{"name": "' ~ f.name ~ '", "arguments": ' -}}
    {{- f.arguments if f.arguments is string else f.arguments | tojson -}}
    {{- '}\\n</tool_call>' -}}
{%- endmacro -%}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' ~ (first ~ '\\n\\n' if first) ~ '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' ~ tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif first %}
    {{- '<|im_start|>system\\n' ~ first ~ '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(question=messages | length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and not ns.found
           and not message.content.startswith('<tool_response>') %}
        {%- set ns.found = true %}
        {%- set ns.question = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' and not loop.first %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set answer = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if not thought and '</think>' in message.content %}
            {%- set thought = message.content.split('</think>')[0] %}
            {%- set thought = thought.split('<think>')[-1].strip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.question and (loop.last or thought) %}
            {{- '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- answer }}
        {%- for c in message.tool_calls or [] %}
            {{- '\\n' if not loop.first or answer }}
            {{- call(c) }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is false }}
{%- endif %}
"""

# As Gemma: the system message goes into the first question, the assistant is "model".
GEMMA = """\
{{- bos_token }}
{%- set start = '' %}
{%- if messages[0].role == 'system' %}
    {%- set start = messages[0].content ~ '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' ~ role ~ '\\n' ~ (start if loop.first) }}
    {{- message.content | trim ~ '<end_of_turn>\\n' }}
{%- endfor %}
{{- '<start_of_turn>model\\n' if add_generation_prompt }}
"""

# As Phi-3: an end of the whole text, but not before the generation prompt.
PHI3 = """\
{%- for message in messages %}
    {{- '<|' ~ message.role ~ '|>\\n' ~ message.content ~ '<|end|>\\n' }}
{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}
"""

# As DeepSeek-R1: thoughts are left out, but the generation prompt opens one.
R1 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|User|>' ~ message.content }}
    {%- else %}
        {{- '<|Assistant|>' ~ message.content.split('</think>')[-1] ~ '</s>' }}
    {%- endif %}
{%- endfor %}
{{- '<|Assistant|><think>\\n' if add_generation_prompt }}
"""

# As DeepSeek-R1-Distill with tools: calls are printed only where the content is none.
R1_TOOLS = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|User|>' + message.content }}
    {%- elif message.role == 'tool' %}
        {{- '<|output|>' + message.content + '<|end|>' }}
    {%- elif message.content is none %}
        {{- '<|Assistant|>' }}
        {%- for call in message.tool_calls %}
            {{- '<|call|>' + call.type + '<|sep|>' + call.function.name + '\\n' }}
            {{- call.function.arguments + '<|end|>' }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}
        {{- '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}
    {%- endif %}
{%- endfor %}
{{- '<|Assistant|><think>\\n' if add_generation_prompt }}
"""

# Messages of one role in a row make one turn.
MERGING = """\
{%- for message in messages %}
    {%- if loop.first or message.role != loop.previtem.role %}
        {{- '<|im_start|>' ~ message.role }}
    {%- endif %}
    {{- '\\n' ~ message.content }}
    {%- if loop.last or message.role != loop.nextitem.role %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""

# A turn's end is printed as a separator; answers in the past lose their thoughts.
SEPARATED = """\
{%- for message in messages %}
    {{- '<|end|>' if not loop.first }}
    {{- message.role ~ ': ' }}
    {{- message.content if loop.last else message.content.split('</think>')[-1] }}
{%- endfor %}
{{- '<|end|>assistant: ' if add_generation_prompt else '<|end|>' }}
"""

# As Qwen3 does: the last answer gets an empty <think> block, earlier ones lose theirs.
REASONING = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

TALK = [
    {"role": "user", "content": "Hi <there> & 🙂 "},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "How?"},
    {"role": "assistant", "content": "Fine.\n"},
]
SYSTEM = {"role": "system", "content": "Be brief."}


def talk(*messages):
    return {"messages": list(messages)}


def text_of(run, tokenizer, record, **options):
    """The text of a record."""
    (sample,) = run([record], tokenizer, data=options).samples
    return tokenizer.decode(sample.token_ids)


def shown(tokenizer, sample) -> str:
    """The text of a sample, with [[ ]] around what is trained on."""
    return mark(list(marked_parts(tokenizer, sample.token_ids, sample.is_target)))


def model_chat(template: str) -> ModelChat:
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    now = datetime.datetime(2024, 7, 26)
    return ModelChat(template, special, source="model", now=now)
