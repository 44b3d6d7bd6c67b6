"""The chat templates that come with a tokenizer, and lmforge's own.

They are applied in `templates.py`.
"""

from typing_extensions import TypedDict

from lmforge.core.data.tokenizer import CHAT_SPECIAL_TOKENS, Tokenizer
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import check_content

# lmforge's own template. A turn is a special token for its role, the content as it is, and <|end|>.
# There is no beginning-of- text token, as there is none in lmforge's pretraining. Tool calls and
# their results are plain text within turns.
LMFORGE_TEMPLATE = """\
{%- if tools %}
    {{- '<|system|><tools>' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '\\n</tools><|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>' }}{% generation %}{{ message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}{{ '<tool_call>\\n' }}
            {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}{{ '\\n</tool_call>' }}
        {%- endfor %}{{ '<|end|>' }}{% endgeneration %}
    {%- elif message.role == 'user' %}
        {{- '<|user|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|user|><tool_response>\\n' + message.content + '\\n</tool_response><|end|>' }}
    {%- else %}
        {{- '<|system|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# Of several templates the one for conversations with tools, and the one for others, as in
# transformers.
TOOL_TEMPLATE = "tool_use"
DEFAULT_TEMPLATE = "default"


class _NamedTemplate(TypedDict):
    """One of several templates in tokenizer_config.json."""

    name: str
    template: str


def find_template_sources(tokenizer: Tokenizer) -> tuple[dict[str, str], str]:
    """A tokenizer's templates by name, or lmforge's own, and the file that holds them.

    Raises UserError if there is none.
    """
    if "chat_template.jinja" in tokenizer.files:
        return {DEFAULT_TEMPLATE: tokenizer.files["chat_template.jinja"]}, "chat_template.jinja"
    source = tokenizer.configs["tokenizer_config.json"].get("chat_template")
    location = "tokenizer_config.json"
    if isinstance(source, list):
        checked = check_content(
            {"chat_template": source}, dict[str, list[_NamedTemplate]], location
        )
        sources = {entry["name"]: entry["template"] for entry in checked["chat_template"]}
        if DEFAULT_TEMPLATE in sources:
            return sources, f"the chat_template of {location}"
    if isinstance(source, str):
        return {DEFAULT_TEMPLATE: source}, f"the chat_template of {location}"
    if all(tokenizer.token_to_id(token) is not None for token in CHAT_SPECIAL_TOKENS):
        return {DEFAULT_TEMPLATE: LMFORGE_TEMPLATE}, "lmforge's own chat template"
    raise UserError(
        "the tokenizer has no chat template; put a chat_template.jinja beside its tokenizer.json,"
        " or start from a model whose tokenizer has one, or lmforge's tokens"
        f" {', '.join(CHAT_SPECIAL_TOKENS)}"
    )


def template_variables(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that a template may name: bos_token, eos_token and so on."""
    variables = {"eos_token": tokenizer.id_to_token(tokenizer.eos_token_id)}
    for role, token in tokenizer.roles.items():
        spelling = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(spelling, str):
            variables[role] = spelling
    return variables
