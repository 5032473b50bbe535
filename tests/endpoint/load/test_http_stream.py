"""The load client's HTTP: answers in every framing, connections used again, servers that end early."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from server.load.http_stream import Connections

OK = b"HTTP/1.1 200 OK\r\n"


class Kept:
    """A reader that keeps everything, and refuses a body with `refused` in it."""

    def __init__(self, refused: bytes | None = None) -> None:
        self.status, self.pieces, self._refused = 0, list[bytes](), refused

    def begin(self, status: int) -> None:
        self.status = status

    def take(self, data: bytes) -> None:
        if self._refused is not None and self._refused in data:
            raise ValueError("refused")
        self.pieces.append(data)


def exchanged(
    answers: Sequence[Sequence[bytes]],
    *,
    make_reader: Callable[[], Kept] = Kept,
    ends: Sequence[bool] = (),
    raises: type[Exception] | tuple[type[Exception], str] | None = None,
) -> tuple[list[Kept], list[tuple[int, bytes]]]:
    """Send a request for each answer, which a server writes in these pieces, and then perhaps closes.

    Returns the readers, and the requests with the number of the connection that each came on. The last
    request must raise `raises`, an exception or one and a part of its message.
    """
    came = list[tuple[int, bytes]]()
    n_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal n_connections
        number, n_connections = n_connections, n_connections + 1
        while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            index = len(came)
            came.append((number, head + await reader.readexactly(length)))
            for piece in answers[index]:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if index < len(ends) and ends[index]:
                break

    async def run() -> list[Kept]:
        async def until_it_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await serve(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass  # the client left
            finally:
                writer.close()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.append(asyncio.create_task(until_it_ends(reader, writer)))

        tasks = list[asyncio.Task[None]]()

        readers = [make_reader() for _ in answers]
        async with asyncio.timeout(30), await asyncio.start_server(accept, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            connections = Connections(f"http://127.0.0.1:{port}/v1", {"X-Key": "k"})
            for i, reader in enumerate(readers):
                if raises is not None and i + 1 == len(readers):
                    kind, message = raises if isinstance(raises, tuple) else (raises, "")
                    with pytest.raises(kind, match=message):
                        await connections.post("/completions", b'{"a":1}', reader)
                else:
                    await connections.post("/completions", b'{"a":1}', reader)
            connections.close()
            await asyncio.gather(*tasks)
        return readers

    return asyncio.run(run()), came


def test_a_chunked_answer_and_one_with_a_length_come_on_one_connection() -> None:
    chunked = [OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nab", b"c\r\n1\r\nd\r\n", b"0\r\n\r\n"]
    plain = [b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nno", b"ne"]
    (first, second), came = exchanged([chunked, plain])
    assert (first.status, b"".join(first.pieces)) == (200, b"abcd")
    assert (second.status, b"".join(second.pieces)) == (404, b"none")
    assert [number for number, _ in came] == [0, 0]
    head, _, body = came[0][1].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nX-Key: k\r\nContent-Length: 7" in head and body == b'{"a":1}'


def test_an_interim_answer_is_passed_over() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    (one,), _ = exchanged([[early, OK + b"Content-Length: 1\r\n\r\nx"]])
    assert (one.status, one.pieces) == (200, [b"x"])


def test_a_body_without_a_length_lasts_until_the_connection_ends() -> None:
    answers = [[OK + b"\r\nab", b"cd"], [OK + b"Content-Length: 0\r\n\r\n"]]
    (one, other), came = exchanged(answers, ends=[True])
    assert b"".join(one.pieces) == b"abcd" and other.status == 200
    assert [number for number, _ in came] == [0, 1]


def test_a_connection_that_the_server_ends_is_not_used_again() -> None:
    closing = [OK + b"Connection: close\r\nContent-Length: 1\r\n\r\nx"]
    _, came = exchanged([closing, closing])
    assert [number for number, _ in came] == [0, 1]


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"HTTP/1.1 200"],
        [OK + b"Content-Length: 9\r\n\r\nx"],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n"],
    ],
)
def test_an_answer_that_ends_early_is_an_error(pieces: list[bytes]) -> None:
    exchanged(
        [pieces], ends=[True], raises=(ConnectionError, "closed the connection before the answer ended")
    )


@pytest.mark.parametrize("answer", [b"SSH-2.0-server\r\n\r\n", OK + b"Content-Length: x\r\n\r\n"])
def test_an_answer_that_is_not_http_is_an_error(answer: bytes) -> None:
    exchanged([[answer]], raises=(ValueError, "not HTTP"))


def test_what_a_reader_raises_ends_the_answer_and_its_connection() -> None:
    refused = [OK + b"Content-Length: 9\r\n\r\nbad", b"more"]
    readers, came = exchanged([refused], make_reader=lambda: Kept(b"bad"), raises=(ValueError, "^refused$"))
    assert readers[0].pieces == [] and len(came) == 1
