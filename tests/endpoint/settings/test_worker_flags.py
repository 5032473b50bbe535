"""The flags of `orca worker` and the options they set."""

from typing import Any

import pytest

from orca_jax.errors import ConfigError
from orca_jax.workers.worker_options import WorkerOptions
from server import cli
from server.commands.worker import worker_options


def options(*arguments: str) -> WorkerOptions:
    """The options of `orca worker --stage 1 --of 2 ARGUMENTS`."""
    args = cli.parser().parse_args(["worker", "--stage", "1", "--of", "2", *arguments])
    return worker_options(args, "a secret of theirs")


def test_stages_count_from_one_in_flags_and_from_zero_inside() -> None:
    result = options("--listen", "127.0.0.1:7000", "--dtype", "bfloat16", "gpt2", "--seed", "4")
    engine = result.engine
    assert (result.stage, result.n_stages, engine.model, engine.dtype, engine.seed) == (
        0,
        2,
        "gpt2",
        "bfloat16",
        4,
    )
    assert (result.link, result.coordinator) == ("transfer", None)
    assert engine.control_secret == "a secret of theirs" and "a secret" not in repr(result)
    assert not engine.command_buffer_collectives
    collectives = options("--listen", "a:1", "--command-buffer-collectives")
    assert collectives.engine.command_buffer_collectives
    assert engine.expert_exchange == "auto"
    exchanging = options("--listen", "a:1", "--expert-exchange", "exchange")
    assert exchanging.engine.expert_exchange == "exchange"


@pytest.mark.parametrize(
    ("listen", "host"),
    [
        ("10.1.2.3:7000", "10.1.2.3"),
        ("[fd00::1]:7000", "fd00::1"),
        ("node-7:7000", "node-7"),
        ("unix:/run/orca/1", "127.0.0.1"),
    ],
)
def test_the_data_host_defaults_to_the_listening_address(listen: str, host: str) -> None:
    assert options("--listen", listen).data_host == host
    assert options("--listen", listen, "--data-host", "10.0.0.9").data_host == "10.0.0.9"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--listen", "0.0.0.0:7000"), "data_host is '0.0.0.0'; it must be an address at which"),
        (("--listen", "a:1", "--link", "nccl"), "link is 'nccl' and coordinator None; nccl needs one"),
        (("--listen", "a:1", "--coordinator", "a:2"), "link is 'transfer' and coordinator 'a:2'"),
        (("--listen", "a:1", "--stage", "3"), "stage is 3; it must be a whole number from 1 to 2"),
        (("--listen", "a:1", "--of", "0"), "the number of stages is 0"),
    ],
)
def test_impossible_options_are_rejected(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as mistake:
        options(*arguments)
    assert message in str(mistake.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: --stage, --of, --listen"),
        (("--stage", "one", "--of", "2", "--listen", "a:1"), "--stage: invalid int value: 'one'"),
        (("--stage", "1", "--of", "2", "--listen", "a:1", "--attention", "interpreted"), "--attention"),
    ],
)
def test_errors_in_the_flags(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[Any]
) -> None:
    assert cli.main(["worker", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("orca: error: ") and message in line
