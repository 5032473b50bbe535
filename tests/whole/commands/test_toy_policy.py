"""A policy defined in this file alone, named as "package.file:Class": the newest request goes first."""

from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

import orca_jax
from orca_jax import LLM, SamplingParams
from orca_jax.errors import ConfigError
from orca_jax.request.request import Request
from orca_jax.scheduling.policy import Choice
from orca_jax.scheduling.request_pool import split
from orca_jax.scheduling.serving_policy import ServingPolicy
from scripts.site.options import options_page
from server import cli
from server.ray.settings import ray_settings
from server.settings.serve_settings import serve_settings

NAME = "tests.whole.commands.test_toy_policy:NewestFirst"
PROMPTS = ("In the beginning", "Once upon", "A", "The")
SECONDS = 120
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


class NewestFirst(ServingPolicy):
    def choose(
        self,
        pool: Iterable[Request],
        n_rsrv: int,
        ahead: Collection[Request],
        alone: Request | None = None,
    ) -> Choice:
        admitted, waiting = split(pool)
        return super().choose([*admitted, *reversed([*waiting])], n_rsrv, ahead, alone)


class WithoutArguments:
    def choose(self) -> None:
        """Never called."""


def order_and_tokens(llm: LLM) -> tuple[list[str], list[list[int]]]:
    """The order in which prompts that were all waiting first ran, and the tokens of each."""
    llm.pause()
    streams = [llm.stream(prompt, GREEDY, request_id=prompt) for prompt in PROMPTS]
    llm.resume()
    tokens = [stream.result(SECONDS).token_ids for stream in streams]
    ran = dict.fromkeys(name for each in llm.service.timeline.iterations for name in each.request_ids)
    return [name for name in ran if name in PROMPTS], tokens


def test_a_policy_by_its_name_chooses_the_rows(tmp_path: Path) -> None:
    with LLM(max_batch_size=1) as llm:
        by_arrival, expected = order_and_tokens(llm)
    record = tmp_path / "record.jsonl"
    with LLM(max_batch_size=1, policy=NAME, record=record) as llm:
        llm.generate(PROMPTS, GREEDY)
        by_age, tokens = order_and_tokens(llm)
        assert llm.serving.scheduling.policy == NAME
    assert by_arrival == list(PROMPTS) and by_age == list(reversed(PROMPTS))
    assert tokens == expected
    report = orca_jax.replay(record)  # up to the pause; the recorded policy chooses again
    assert report.n_requests == len(PROMPTS) and report.same


def test_it_is_found_where_users_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def served(*flags: str, **environ: str) -> str:
        return serve_settings(cli.parser().parse_args(["serve", *flags]), environ).engine.policy

    (tmp_path / "orca.yaml").write_text(f"policy: {NAME}\n")
    assert served("--policy", NAME) == served(ORCA_POLICY=NAME) == NAME
    assert served("--config", str(tmp_path / "orca.yaml")) == NAME
    assert ray_settings({"policy": NAME}, {})[0].engine.policy == NAME
    for command in ("serve", "generate", "chat", "compile"):
        assert cli.main([command, "--help"]) == 0
        assert "--policy {default,orca,package.file:Class}" in capsys.readouterr().out
    (row,) = (line for line in options_page().splitlines() if line.startswith("| `policy` |"))
    assert "one of default, orca, package.file:Class" in row


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("fcfs", "policy is 'fcfs'; it must be one of default, orca, package.file:Class"),
        ("a b:C", "policy is 'a b:C'; it must have the form package.file:name"),
        ("no_such_package.policies:Mine", "which cannot be imported: No module named 'no_such_package'"),
        (NAME.replace("Newest", "Oldest"), "which cannot be imported: module .* has no attribute"),
        ("json:dumps", "which is no class with a method choose"),
        (NAME.replace("NewestFirst", "WithoutArguments"), "cannot be made from .config, kv, .*, n_workers."),
    ],
)
def test_a_mistake_in_its_name_is_reported_before_the_model_is_looked_for(policy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("/no/such/model", policy=policy)
