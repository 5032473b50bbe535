"""Replies to conversations and outputs of prompts, for commands that hold the model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orca_jax.request.chat.chat_prompts import ChatPrompts
from orca_jax.request.chat.conversation import prompt_text
from orca_jax.request.chat.template_files import load_chat_template
from orca_jax.request.chat.tools import NO_TOOLS, ToolWish
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.scheduling.admission import CheckedPrompt
from orca_jax.service.generation import Generation
from orca_jax.service.prepared_params import OutputRules
from server.gateway.reply.reply_plan import ReplyPlan, ReplyReader, plan_reply
from server.gateway.served_model import ServedModel
from server.gateway.tool_formats.table import AUTO, reply_formats

if TYPE_CHECKING:
    from orca_jax import LLM

Message = Mapping[str, Any]

_NO_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A reply that can be generated: its prompt, the output's rules, and how the output is read."""

    prompt: CheckedPrompt
    rules: OutputRules
    plan: ReplyPlan

    def reader(self) -> ReplyReader:
        return ReplyReader(self.plan, self.rules, continuing=self.rules.follow_text(self.prompt.token_ids))


class Replies:
    """A model's replies, with its chat template or the one in `chat_template`.

    `advice` is what to do without a template. Raises CorruptFile or ConfigError.
    """

    def __init__(
        self,
        llm: "LLM",
        *,
        chat_template: Path | None = None,
        tool_format: str = AUTO,
        reasoning_format: str = AUTO,
        advice: str,
    ) -> None:
        templates = load_chat_template(llm.text_directory, chat_template)
        formats = reply_formats(templates, tool_format, reasoning_format)
        self._service = llm.service
        self.prompts = ChatPrompts(
            model=llm.name,
            tokenizer=llm.tokenizer,
            templates=templates,
            directory=llm.text_directory,
            has_encoder=llm.config.encoder is not None,
            advice=advice,
        )
        self._model = ServedModel(
            name=llm.name,
            service=llm.service,
            config=llm.config,
            serving=llm.serving,
            tokenizer=llm.tokenizer,
            chat_template=templates,
            tool_format=formats.tools,
            reasoning_format=formats.reasoning,
        )

    def prepare(
        self,
        messages: Sequence[Message],
        sampling: Callable[[int], SamplingParams],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        wish: ToolWish = NO_TOOLS,
        chat_template: str | None = None,
        **rendering: Any,
    ) -> Prepared:
        """Render and check a conversation; `rendering` are arguments of `prompt_text`.

        `sampling` takes how many tokens the reply may have at most, below 1 if there is no room.

        Raises a leaf of InvalidRequest.
        """
        template = self.prompts.template(chat_template, has_tools=bool(tools))
        text = prompt_text(template, messages, tools=tools, **rendering)
        token_ids = self.prompts.token_ids(text)
        params = sampling(self._service.most_output(len(token_ids)))
        plan = plan_reply(self._model, text, params, wish)
        rules = self._service.rules(params, plan.form, plan.loose_form)
        return Prepared(self._service.check(token_ids, rules), rules, plan)

    def start(self, prepared: Prepared) -> list[Generation]:
        """Start the outputs of a reply; if one cannot start, none is left running."""
        return _all_or_none(
            self._service.submit(prepared.prompt, rules) for rules in prepared.rules.choices()
        )


def start_outputs(llm: "LLM", prompt: Any, sampling: SamplingParams) -> list[Generation]:
    """Start `sampling.n` outputs of a prompt; only the first has the prompt's log-probabilities.

    Raises as `LLM.stream` does, after stopping the outputs already started.
    """

    def streams() -> Iterator[Generation]:
        ids = prompt
        for choice in sampling.choices(prompt_once=True):
            stream = llm.stream(ids, choice)
            ids = stream.prompt_ids  # so that the prompt is tokenised only once
            yield stream

    return _all_or_none(streams())


def _all_or_none(outputs: Iterable[Generation]) -> list[Generation]:
    """Start all outputs; if one cannot start, cancel the others and raise its error."""
    started = list[Generation]()
    try:
        for output in outputs:
            started.append(output)
    except BaseException:
        close_outputs(started)
        raise
    return started


def close_outputs(outputs: list[Generation]) -> None:
    """Cancel the outputs that are still running."""
    for output in outputs:
        output.close()


def printable(text: str) -> str:
    """The text with control characters replaced, which a terminal executes, but for line breaks and tabs."""
    return text.translate(_NO_CONTROLS)
