"""Chat templates of the shapes that models ship, written anew: what they do with turns, tools and
thoughts is theirs.

Each with its special tokens, the last of which ends texts; the kinds of replies that can be
appended to it; and those that cannot, since it writes earlier turns otherwise.
"""

from typing import NamedTuple


class Shape(NamedTuple):
    specials: list[str]
    kinds: list[tuple[str, ...]]
    refused: list[tuple[str, ...]]
    source: str


PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CALL = "{'name': call.function.name, 'arguments': call.function.arguments} | tojson"
TOOL, USER, BOTH = ("tool",), ("user",), ("tool", "user")

# ChatML with Hermes' calls: neighbouring results share one turn of the user (Qwen 2.5).
HERMES = (
    """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}Tools:
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' + m.content }}{% endif %}
{%- for call in m.tool_calls %}{{ '\n<tool_call>\n' }}{{ """
    + CALL
    + """ }}{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}"""
    + PROMPT
)
# The same, where thoughts before the last question are left out (Qwen 3).
THINKING = HERMES.replace(
    "{%- for m in messages %}\n",
    """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set said = m.content %}{% set thought = '' %}
{%- if m.role == 'assistant' and '</think>' in said %}
{%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}
{%- if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}
{%- set said = '<think>\n' + thought + '\n</think>\n\n' + said %}{% endif %}
""",
    1,
)
THINKING = THINKING.replace("m.role + '\n' + m.content", "m.role + '\n' + said").replace(
    "{% if m.content %}{{ '\n' + m.content }}{% endif %}\n", "{{ '\n' + said }}\n"
)
# No thought is kept, in none of the earlier answers (DeepSeek R1).
FORGETFUL = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- else %}{% set said = m.content.split('</think>')[-1] if '</think>' in m.content else m.content %}
{{- '<|Assistant|>' + said + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""
# Tools are in the first question; one call an answer; results are a turn of their own (Llama 3.1).
HEADERS = """{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- elif m.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if loop.first and tools %}{{ 'Functions:\n\n' }}{% for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}
{%- endif %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
# Calls as Python writes them, in a turn that another token ends (Llama 4).
PYTHONIC = """{{ bos_token }}{% if tools %}{{ '<|header|>system<|/header|>\n\n' + tools | tojson + '<|eot|>' }}{% endif %}
{%- for m in messages %}{{ '<|header|>' + ('ipython' if m.role == 'tool' else m.role) + '<|/header|>\n\n' }}
{%- if m.tool_calls %}{{ m.content + '[' }}{% for call in m.tool_calls %}{{ call.function.name + '(' }}
{%- for key, value in call.function.arguments.items() %}{{ key + '=' + value | tojson }}{{ ', ' if not loop.last }}{% endfor %}
{{- ')' }}{{ ', ' if not loop.last }}{% endfor %}{{ ']<|eom|>' }}
{%- else %}{{ m.content + '<|eot|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"""
# Tools go before the last question, wherever it is, and ids have nine characters (Mistral v3).
MOVING = """{{ bos_token }}{% set ns = namespace(last=-1) %}{% set system = '' %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}
{%- set messages = messages[1:] %}{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if loop.index0 == ns.last and tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + (system if loop.index0 == ns.last else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}{{ ', ' if not loop.last }}
{%- endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ m.content + eos_token }}
{%- else %}{{ '[TOOL_RESULTS]' + {'content': m.content, 'call_id': m.tool_call_id} | tojson + '[/TOOL_RESULTS]' }}{% endif %}
{%- endfor %}"""
# Tools at the beginning, and names before arguments (Mistral since 2025).
NAMED = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}
{%- set messages = messages[1:] %}{% endif %}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{ m.content }}{% for call in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}{% endfor %}{{ eos_token }}
{%- else %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"""
# No tools and no system: its words go before the first question (Gemma).
MODEL = """{{ bos_token }}{% set before = '' %}
{%- if messages[0].role == 'system' %}{% set before = messages[0].content + '\n\n' %}
{%- set messages = messages[1:] %}{% endif %}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (before if loop.first else '') }}
{{- m.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
# A token ends a turn, and another one the whole text (Phi).
CLOSED = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
# The last answer ends with another token than earlier ones (gpt-oss).
RETURNING = """{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}
{{- '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

CHATML_TOKENS = ["<|im_start|>", "<|im_end|>"]
MISTRAL_TOKENS = [
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]
LLAMA_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SHAPES = {
    "Qwen 2.5": Shape(CHATML_TOKENS, [BOTH], [], HERMES),
    "Qwen 3": Shape(CHATML_TOKENS, [TOOL], [USER], THINKING),
    "DeepSeek R1": Shape(
        ["<|bos|>", "<|User|>", "<|Assistant|>", "<|eos|>"], [], [USER], FORGETFUL
    ),
    "Llama 3.1": Shape(LLAMA_TOKENS, [BOTH], [], HEADERS),
    "Llama 4": Shape(
        ["<|bos|>", "<|header|>", "<|/header|>", "<|eom|>", "<|eot|>"], [BOTH], [], PYTHONIC
    ),
    "Mistral v3": Shape(["<s>", *MISTRAL_TOKENS, "[TOOL_CALLS]", "</s>"], [TOOL], [BOTH], MOVING),
    "Mistral of 2025": Shape(
        [
            "<s>",
            *MISTRAL_TOKENS,
            "[TOOL_CALLS]",
            "[ARGS]",
            "[SYSTEM_PROMPT]",
            "[/SYSTEM_PROMPT]",
            "</s>",
        ],
        [BOTH],
        [],
        NAMED,
    ),
    "Gemma": Shape(["<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"], [USER], [], MODEL),
    "Phi": Shape(
        ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"], [USER], [], CLOSED
    ),
    "gpt-oss": Shape(["<|start|>", "<|message|>", "<|end|>", "<|return|>"], [], [USER], RETURNING),
}
