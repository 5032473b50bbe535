"""The intake: checks requests against an engine's model and sizes. It needs no engine, so other processes can
have one too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from orca_jax.config import ServingConfig
from orca_jax.errors import InvalidSamplingParameter, UnknownAdapter, did_you_mean, shown
from orca_jax.families.model_config import ModelConfig
from orca_jax.request.adapter import Adapter
from orca_jax.request.output_form import PLAIN_TEXT, OutputForm
from orca_jax.request.pooling import Pooling
from orca_jax.request.sampling_params import SamplingParams
from orca_jax.request.scheduling_params import PLAIN, SchedulingParams
from orca_jax.request.tokenizer import Tokenizer
from orca_jax.scheduling.admission import (
    CheckedPrompt,
    EncoderInputs,
    TokenName,
    check_prompt,
    check_search,
    check_use,
    longest_request,
    unnamed,
)
from orca_jax.service.prepared_params import OutputRules, RuleMaker
from orca_jax.speculation.drafter import Speculation


class Intake:
    """Checks of parameters and prompts, on any thread. `speculation` is the engine's, if outputs are drafted.

    `pooling` is the default of embeddings; without it, the last token's state, or the first one's in a model
    without causal masks. A ranker's is what its head reads.
    """

    def __init__(
        self,
        *,
        config: ServingConfig,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        speculation: Speculation | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        self.model = model
        of_ranker = model.ranker_head.pooling if model.ranker else None
        self.pooling: Pooling = of_ranker or pooling or ("cls" if model.is_bidirectional else "last")
        self.token_name: TokenName = unnamed if tokenizer is None else tokenizer.token_name
        self.speculation = speculation
        self.serving = config
        self._order = config.scheduling.scheduling_policy
        self._limit = longest_request(config=config, model=model)
        self._inputs = EncoderInputs(config, model, self.token_name)
        self._rules = RuleMaker(
            model, tokenizer, max_batch_size=config.max_batch_size, speculation=speculation
        )

    def rules(
        self, sampling: SamplingParams, form: OutputForm = PLAIN_TEXT, loose: OutputForm | None = None
    ) -> OutputRules:
        """Check and compile parameters, with the form `loose` if no grammar can be made of `form`.

        A grammar may take seconds. Raises a leaf of InvalidRequest.
        """
        try:
            return self._rules.rules(sampling, form)
        except InvalidSamplingParameter as error:
            if loose is None or error.param != form.field:
                raise
        return self._rules.rules(sampling, loose)

    def check(
        self,
        prompt_ids: Sequence[int],
        rules: OutputRules,
        scheduling: SchedulingParams = PLAIN,
        *,
        tenant: str = "",
        decoder_ids: Sequence[int] | None = None,
        pooling: Pooling | None = None,
    ) -> CheckedPrompt:
        """Check a prompt before anything runs; `submit` does not check it again.

        With `pooling` the request is for an embedding.

        With an encoder the prompt is its input, and the output follows `decoder_ids`. These begin with the
        model's `decoder_start_token_id`, which is added if it is missing.

        Prompts of different tenants share no keys and values. Where the cache is, the prompt's blocks are
        hashed here, once for all its outputs and on the caller's thread, so that a long prompt does not delay
        the scheduler.

        Raises a leaf of InvalidRequest.
        """
        if scheduling.priority:
            scheduling.check_policy(self._order)
        check_use(self.model, pooling)
        encoder_ids, prompt_ids = self._inputs.split(prompt_ids, decoder_ids, rules.sampling)
        checked = check_prompt(
            prompt_ids,
            rules.sampling.max_tokens,
            model=self.model,
            limit=self._limit,
            token_name=self.token_name,
        )
        check_search(len(prompt_ids), len(encoder_ids), rules.sampling, self.model, self.serving)
        adapter = self.adapter(scheduling.adapter)
        salt = (tenant, scheduling.cache_salt or "", *([] if adapter is None else [adapter.salt]))
        return replace(
            checked,
            encoder_ids=encoder_ids,
            pooling=pooling,
            priority=scheduling.priority,
            cache_salt=salt,
            block_hashes=self._hashes(checked.token_ids, salt),
            adapter=adapter,
            kv_transfer=scheduling.kv_transfer,
        )

    def _hashes(self, token_ids: Sequence[int], cache_salt: Sequence[str]) -> tuple[bytes, ...] | None:
        """The hashes of a prompt's full blocks; None where no prefix cache is."""
        return None

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The LoRA adapters that requests may choose, by name."""
        return {}

    def adapter(self, name: str | None) -> Adapter | None:
        """The LoRA adapter of this name; None for None. Raises UnknownAdapter."""
        found = None if name is None else self.adapters.get(name)
        if found is None and name is not None:
            known = ", ".join(self.adapters) or "none"
            message = f"there is no adapter {shown(name)} here; the adapters are {known}"
            raise UnknownAdapter(f"{message}{did_you_mean(name, self.adapters)}", param="adapter")
        return found

    def most_output(self, n_input: int) -> int:
        """The largest `max_tokens` for a prompt of `n_input` tokens; below 1 if the prompt is too long."""
        n_output = self._limit.n_tokens - (n_input if self.model.encoder is None else 1)
        return n_output - self.model.is_bidirectional  # whose token is no output
