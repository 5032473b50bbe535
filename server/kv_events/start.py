"""Makes the publisher that a server's settings ask for; imports ZeroMQ only then."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from orca_jax.errors import ConfigError
from orca_jax.extras import install_line
from server.settings.router_options import RouterOptions

if TYPE_CHECKING:
    from server.kv_events.publisher import Publisher


def kv_publisher(options: RouterOptions) -> "Publisher | None":
    """A publisher with its addresses bound, to be started; None if no events are asked for.

    Raises ConfigError if a library is missing or an address is of no use.
    """
    if options.kv_events is None:
        return None
    missing = [name for module, name in (("zmq", "pyzmq"), ("msgpack", "msgpack")) if not find_spec(module)]
    if missing:
        raise ConfigError(
            f"kv_events needs {' and '.join(missing)}: {install_line('kv-events')} (or leave it out)"
        )
    # Imported on demand: the libraries are an extra, which a server without events does not need.
    from server.kv_events.publisher import Publisher

    return Publisher(options.kv_events, options.kv_events_replay, topic=options.kv_events_topic)
