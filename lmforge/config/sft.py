"""The options of `lmforge sft`: supervised fine-tuning."""

from typing import ClassVar, Literal

from lmforge.config.options import option, section
from lmforge.config.sections import ConversationFormat, Stage
from lmforge.config.tuning import ExampleOptions, TunedConfig


class ConversationOptions(ExampleOptions):
    """Conversations, or prompts with completions."""

    format: ConversationFormat = option("auto", "format of the records; auto goes by the fields of the first record")
    mask: Literal["assistant", "last", "all"] = option(
        "assistant", "tokens that the loss counts: every assistant turn, the last one only, or all tokens"
    )


class SftConfig(TunedConfig):
    """lmforge sft [RECIPE.toml]: fine-tune a model on conversations, all of its weights or adapters."""

    of_stage: ClassVar[Stage] = "sft"
    data: ConversationOptions = section(ConversationOptions, "conversations to train on")

    @property
    def kind(self) -> str:
        return "conversations"
