"""`millstream request` and `reply`: ask, and answer."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from millstream.cli.options.bodies import (
    BodyArgument,
    HeaderOption,
    TemplateOption,
    body_bytes,
    filled,
    header_pairs,
)
from millstream.cli.output import JsonOption
from millstream.cli.session import ServerOption, run
from millstream.errors import ConfigError, MillstreamError
from millstream.settings import child_environment, parse_duration

if TYPE_CHECKING:
    from millstream.messaging import Message
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer()

REPLY_QUEUE: Final = "millstream-reply"
COMMANDS_AT_ONCE: Final = 16  # processes that answer at the same time; more would fight for the CPU
COMMAND_SECONDS: Final = 60.0  # nobody waits longer for an answer
OUTPUT_ERROR_CHARS: Final = 200  # of a failed command's words that fit into a header


@app.command()
def request(
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="Whom to ask.")],
    body: BodyArgument = None,
    header: HeaderOption = None,
    replies: Annotated[
        int, typer.Option("--replies", "-n", min=0, help="So many answers; 0: of all who listen.")
    ] = 1,
    timeout: Annotated[str, typer.Option("--timeout", help="How long to wait.")] = "5s",
    raw: Annotated[
        bool, typer.Option("--raw", "-r", help="Print the bare bodies, each with a line end.")
    ] = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Ask on a subject and print the answer; an error at once when nobody listens.

    An answer that is an error makes the exit code 1. With --json one object for each answer.
    """
    data, pairs, seconds = body_bytes(body), header_pairs(header), parse_duration(timeout)

    async def ask(mill: "Mill") -> "list[Message]":
        if replies == 1:
            return [await mill.request(subject, data, pairs, seconds)]
        limit = {"limit": replies} if replies else {}
        return await mill.gather(subject, data, pairs, timeout=seconds, **limit)

    _show(run(ask, server), raw, json_)


def _show(answers: "list[Message]", raw: bool, as_json: bool) -> None:
    from millstream.cli.commands.sub import message_writer

    write = message_writer(raw, as_json)
    errors: list[MillstreamError] = []
    for number, answer in enumerate(answers, 1):
        error = answer.service_error
        if error is not None:
            errors.append(error)
        line = answer.data + b"\n" if not as_json and len(answers) == 1 else write(number, answer)
        typer.echo(line, nl=False)
    if errors:
        raise errors[0]


@app.command()
def reply(
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="Subject to answer on; wildcards allowed.")
    ],
    body: Annotated[str | None, typer.Argument(metavar="[BODY]", help="The answer.")] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Answer with the request itself.")] = False,
    command: Annotated[
        str | None,
        typer.Option(help="Answer with what this program prints; it reads the request."),
    ] = None,
    queue: Annotated[
        str, typer.Option("--queue", "-q", help="Queue group that shares the requests.")
    ] = REPLY_QUEUE,
    count: Annotated[
        int | None, typer.Option("--count", "-c", min=1, help="End after so many answers.")
    ] = None,
    header: HeaderOption = None,
    template: TemplateOption = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Answer requests until Ctrl-C: with a body, an echo, or the output of a program.

    Several of them share the load. A program that fails answers with error 500. It finds the
    subject in MILLSTREAM_SUBJECT.
    """
    if (body is not None) + echo + (command is not None) != 1:
        raise ConfigError("give one of: a body, --echo, --command PROGRAM")
    answer = _Answer(None if body is None else body_bytes(body), command, template)
    pairs = header_pairs(header)
    run(lambda mill: _serve(mill, subject, queue, count, (answer, pairs, json_)), server)


@dataclass(frozen=True, slots=True)
class _Answer:
    """How a request is answered; neither body nor command means an echo."""

    body: bytes | None
    command: str | None
    template: bool

    async def to(self, message: "Message", number: int) -> bytes:
        if self.command is not None:
            return await self._output(self.command, message)
        if self.body is None:
            return message.data
        if not self.template:
            return self.body
        return filled(self.body, _words(message, number))

    async def _output(self, command: str, message: "Message") -> bytes:
        import asyncio
        import shlex
        from asyncio.subprocess import PIPE

        child = await asyncio.create_subprocess_exec(
            *shlex.split(command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=child_environment(MILLSTREAM_SUBJECT=message.subject),
        )
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                out, err = await child.communicate(message.data)
        except TimeoutError:
            raise ConfigError(f"no output within {COMMAND_SECONDS:g} s") from None
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode:
            words = err.decode("utf-8", "replace").strip()[-OUTPUT_ERROR_CHARS:]
            raise ConfigError(f"exit code {child.returncode}: {words}")
        return out


def _words(message: "Message", number: int) -> dict[str, bytes]:
    from millstream.cli.options.positions import time_text
    from millstream.deadline import now_ns
    from millstream.wire.protocol import unique_token

    return {
        "Count": b"%d" % number,
        "Time": time_text(now_ns()).encode(),
        "ID": unique_token().encode(),
        "Subject": message.subject.encode("utf-8", "surrogateescape"),
        "Request": message.data,
    }


async def _serve(
    mill: "Mill",
    subject: str,
    queue: str,
    count: int | None,
    manner: tuple[_Answer, list[tuple[str, str]], bool],
) -> None:
    import asyncio

    from millstream.cli.commands.sub import message_writer
    from millstream.cli.views.lines import Lines
    from millstream.messaging import SubscriberSettings

    answer, headers, as_json = manner
    write = message_writer(False, as_json)
    slots = asyncio.Semaphore(COMMANDS_AT_ONCE)

    async def respond(message: "Message", number: int) -> None:
        try:
            message.respond(await answer.to(message, number), headers)
        except (ConfigError, OSError) as error:
            typer.echo(f"error: {error}", err=True)
            message.respond_error(500, str(error))
        finally:
            slots.release()

    number = 0
    running: set[asyncio.Task[None]] = set()
    subscriber = mill.subscribe(subject, SubscriberSettings(queue=queue))
    async with subscriber, Lines() as out:
        typer.echo(f"Answering on '{subject}'", err=True)
        while count is None or number < count:
            message = await subscriber.next()
            if message.reply is None:
                continue  # published, not asked
            number += 1
            await out.write(write(number, message))
            await slots.acquire()
            task = asyncio.get_running_loop().create_task(respond(message, number))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
    await mill.flush()
