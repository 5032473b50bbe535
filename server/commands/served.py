"""Loads the model that a server's settings name and runs its first iterations."""

from typing import TYPE_CHECKING

from orca_jax.engine.owned_pipeline import StartWorkers
from orca_jax.request.chat.conversation import left_out
from orca_jax.request.chat.template_files import load_chat_template
from orca_jax.request.sampling_params import SamplingParams
from server.commands.loading import load
from server.commands.notes import Notes
from server.gateway.served_model import ServedModel
from server.gateway.tool_formats.table import reply_formats
from server.process.interpreter import settle
from server.settings.serve_settings import ServeSettings

if TYPE_CHECKING:
    from orca_jax import LLM


def load_served(
    settings: ServeSettings, notes: Notes, start_workers: StartWorkers | None = None
) -> "tuple[LLM, ServedModel]":
    """Load and warm up: compile what is compiled ahead, and run a prefill and a decode iteration.

    `start_workers` is as in LLM.from_config. The caller closes the LLM. Raises ConfigError or EngineError;
    then nothing is left running.
    """
    options = settings.endpoint
    reply_formats(
        None, options.tool_format, options.reasoning_format
    )  # report a mistake before the slow part
    if options.chat_template is not None:
        load_chat_template(None, options.chat_template)  # report a mistake in it before the slow part
    llm = load(notes, settings.engine, start_workers)
    try:
        template = load_chat_template(llm.text_directory, options.chat_template)
        if template is not None:
            template.read_ahead()
            if note := left_out(template):
                notes(note)
        formats = reply_formats(template, options.tool_format, options.reasoning_format)
        llm.service.scheduler.kv.hash_seed = settings.routing.prefix_hash_seed  # before the first request
        if settings.api_keys.weights:
            llm.service.weigh_owners(settings.api_keys.weights)
        n_output = min(2, llm.service.most_output(1))
        llm.generate([[0]], SamplingParams(max_tokens=n_output, temperature=0.0, ignore_eos=True))
    except BaseException:
        llm.close()
        raise
    settle()
    return llm, ServedModel(
        name=settings.model_name,
        service=llm.service,
        config=llm.config,
        serving=llm.serving,
        tokenizer=llm.tokenizer,
        chat_template=template,
        tool_format=formats.tools,
        reasoning_format=formats.reasoning,
        defaults=llm.generation_defaults,
        compiles=lambda: llm.compiles,
        controls=llm.controls if settings.admin_keys.required else None,
    )
