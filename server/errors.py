"""The errors that the server and the commands add to the engine's. Their HTTP statuses are in statuses.py."""

from orca_jax.errors import OrcaError, QueueFull


class UsageError(OrcaError):
    """A mistake in a command line, an environment variable or a settings file."""


class TraceError(OrcaError, ValueError):
    """A file is not a valid trace; the message names file, line and field."""


class ClientEnded(OrcaError, RuntimeError):
    """A process of the load client ended before its requests did."""


class NotReady(OrcaError):
    """The model is still loading, or the server is shutting down. Retry later, or on another server."""


class UnknownModel(OrcaError):
    """The request names a model that this server does not serve."""


class UnknownResponse(OrcaError):
    """No response of that id is stored for this client. `param` names the field that has the id."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class UnknownThread(OrcaError):
    """The server holds no conversation that the request could go on from."""


class Unauthorized(OrcaError):
    """An API key is missing or wrong."""


class RequestIdTaken(OrcaError):
    """The request id belongs to a request that is still live."""


class NotPermitted(OrcaError):
    """The server does not do this for anybody who has only an API key."""


class UnknownRecording(OrcaError):
    """The server has no recording of that name."""


class UnknownFile(OrcaError):
    """The server has no file of that id for this API key."""


class UnknownBatch(OrcaError):
    """The server has no batch of that id for this API key."""


class BatchesOff(OrcaError):
    """The server keeps no files and runs no batches."""


class StoreFull(OrcaError):
    """The server's folder of files, or this API key's share of it, is full."""


class StoreFailed(OrcaError):
    """The disk under the server's folder of files failed. Nothing was changed; it may work again later."""


class DiskFull(StoreFailed):
    """The disk under the server's folder of files is full."""


class Overloaded(QueueFull):
    """Several other clients have filled the limit for such work, in which this client has nothing."""


class TooManyViewers(OrcaError):
    """As many people watch the live view as it has places for."""


class TooManyConnections(OrcaError):
    """The server has reached its limit of open connections."""


class TooManyFromAddress(OrcaError):
    """A client address has reached its limit of open connections."""
