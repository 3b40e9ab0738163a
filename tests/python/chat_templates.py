"""Chat templates as models publish them, shortened: long instructions are left out, and what they do is kept."""

# ruff: noqa: E501, RUF001 (templates read better in their own lines; one has bars and spaces of its own)
from __future__ import annotations

from chat_templates_tools import (
    DEEPSEEK_R1_DISTILL,
    GRANITE_3,
    LLAMA_3_1,
    LLAMA_3_2,
    MISTRAL_V0_3,
    QWEN_2_5,
    QWEN_3,
)

# SmolLM2's, whose own system message is longer.
CHATML_STYLE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

ZEPHYR_STYLE = (
    "{% for message in messages %}\n{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)

# Flags in the system message switch reasoning, and tools have a name of their own.
SMOLLM3 = """\
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set reasoning_mode = "/think" if enable_thinking else "/no_think" -%}
{{- "<|im_start|>system\\n" -}}
{%- if messages[0].role == "system" -%}
    {%- set system_message = messages[0].content -%}
    {%- if "/no_think" in system_message -%}{%- set reasoning_mode = "/no_think" -%}
    {%- elif "/think" in system_message -%}{%- set reasoning_mode = "/think" -%}{%- endif -%}
    {%- set custom = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- "Reasoning Mode: " + reasoning_mode + "\\n\\n" -}}
{{- (custom or "You are SmolLM.") + "\\n\\n" -}}
{%- if xml_tools -%}
    {{- "<tools>\\n" }}{%- for tool in xml_tools %}{{ tool | string }}{{ "\\n" }}{%- endfor -%}{{- "</tools>\\n" }}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}
        {{ "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if reasoning_mode == "/think" -%}
            {{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}
        {{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ "<|im_start|>assistant\\n" }}
    {%- if reasoning_mode != "/think" -%}{{ "<think>\\n\\n</think>\\n" }}{%- endif -%}
{%- endif -%}
"""

# Refuses a system message.
GEMMA_2 = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

GEMMA_3 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""

# Refuses a system message. Its markers are no tokens, but for the end.
MISTRAL_V0_1 = """\
{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- if message['role'] == 'user' %}
{{- '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}
{{- message['content'] + eos_token + ' ' }}
{%- else %}
{{- raise_exception('Only user and assistant roles are supported!') }}
{%- endif %}
{%- endfor %}"""

# Ignores a system message, and every role that it does not know.
PHI_3 = """\
{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') %}
{{- '<|user|>\\n' + message['content'] + '<|end|>\\n<|assistant|>\\n' }}
{%- elif (message['role'] == 'assistant') %}
{{- message['content'] + '<|end|>\\n' }}
{%- endif %}
{%- endfor %}"""

# Takes tools as text that is a field of the system message.
PHI_4_MINI = """\
{% for message in messages %}
{%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}
{%- else %}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}
"""

# Only the end is a token.
OLMO_2 = """\
{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'system' %}
{{- '<|system|>\\n' + message['content'] + '\\n' }}
{%- elif message['role'] == 'user' %}
{{- '<|user|>\\n' + message['content'] + '\\n' }}
{%- elif message['role'] == 'assistant' %}
{{- '<|assistant|>\\n'  + message['content'] + eos_token }}{% if not loop.last %}{{- '\\n' }}{% endif %}
{%- endif %}
{%- if loop.last and add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}
{%- endfor %}"""

PUBLISHED = {
    "smollm2": CHATML_STYLE,
    "smollm3": SMOLLM3,
    "llama-3.1": LLAMA_3_1,
    "llama-3.2": LLAMA_3_2,
    "qwen2.5": QWEN_2_5,
    "qwen3": QWEN_3,
    "gemma-2": GEMMA_2,
    "gemma-3": GEMMA_3,
    "mistral-v0.1": MISTRAL_V0_1,
    "mistral-v0.3": MISTRAL_V0_3,
    "phi-3": PHI_3,
    "phi-4-mini": PHI_4_MINI,
    "granite-3": GRANITE_3,
    "olmo-2": OLMO_2,
    "deepseek-r1-distill": DEEPSEEK_R1_DISTILL,
}
#: They refuse or ignore a system message.
WITHOUT_SYSTEM = {"gemma-2", "mistral-v0.1", "phi-3"}
#: They take `tools`, and all of them but the first know calls and results.
WITH_TOOLS = {"granite-3", "llama-3.1", "llama-3.2", "mistral-v0.3", "qwen2.5", "qwen3"}

#: What the vocabularies of these models have as control tokens.
CONTROL_TEXTS = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *(
        "<|eom_id|>",
        "<|python_tag|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
    ),
    *(
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "<|user|>",
        "<|system|>",
    ),
    *("<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>", "<|start_of_role|>", "<|end_of_role|>"),
    *("<|end_of_text|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *(
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
        "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
    ),
]
