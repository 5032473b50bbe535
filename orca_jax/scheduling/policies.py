"""Policies by name: the default policy, Algorithm 1, or a user's class."""

import inspect
from typing import Any

from orca_jax.checks import named_object
from orca_jax.config import ServingConfig
from orca_jax.errors import ConfigError
from orca_jax.scheduling.kv_manager import KVManager
from orca_jax.scheduling.policy import OrcaPolicy, Policy
from orca_jax.scheduling.serving_policy import ServingPolicy


def configured_policy(config: ServingConfig, kv: KVManager, *, n_workers: int) -> Policy:
    """The configured policy of an engine with `n_workers` workers. Raises ConfigError."""
    name = config.scheduling.policy
    if name == "orca":
        return OrcaPolicy(config, kv, n_workers=n_workers)
    if name == "default":
        return ServingPolicy(config, kv, n_workers=n_workers)
    return users_policy(name)(config, kv, n_workers=n_workers)


def users_policy(name: str) -> Any:
    """The class named "package.file:Class", which takes ServingPolicy's arguments. Raises ConfigError."""
    made = named_object("policy", name)
    if not callable(made) or not callable(getattr(made, "choose", None)):
        raise ConfigError(
            f"policy is {name!r}, which is no class with a method choose; see orca_jax/scheduling/policy.py"
        )
    try:
        inspect.signature(made).bind(None, None, n_workers=1)
    except TypeError as error:
        raise ConfigError(
            f"policy is {name!r}, which cannot be made from (config, kv, *, n_workers): {error}"
        ) from error
    return made
