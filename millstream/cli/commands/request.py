"""`millstream request` and `reply`: send requests and answer them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from millstream.cli.options.bodies import (
    BodyArgument,
    HeaderOption,
    TemplateOption,
    body_bytes,
    fill_template,
    header_pairs,
    template_variables,
)
from millstream.cli.options.groups import grouped
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
COMMANDS_MAX: Final = 16  # processes that answer at the same time
COMMAND_SECONDS: Final = 60.0  # no client waits longer for an answer
OUTPUT_ERROR_CHARS: Final = 200  # of a failed command's output that fit into a header


@app.command()
def request(
    subject: Annotated[str, typer.Argument(metavar="SUBJECT", help="Subject to send to.")],
    body: BodyArgument = None,
    header: HeaderOption = None,
    *,
    replies: Annotated[
        int,
        typer.Option("--replies", "-n", min=0, help="Number of answers; 0 for all responders."),
    ] = 1,
    timeout: Annotated[str, typer.Option("--timeout", help="How long to wait.")] = "5s",
    raw: Annotated[
        bool, typer.Option("--raw", "-r", help="Print only the bodies, one per line.")
    ] = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Send a request and print the answer; without a responder it fails immediately.

    If the answer is an error, the exit code is 1. With --json one object for each answer.
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


@dataclass(frozen=True, slots=True)
class _AnswerOptions:
    """What requests are answered with."""

    echo: Annotated[bool, typer.Option("--echo", help="Answer with the request itself.")] = False
    command: Annotated[
        str | None,
        typer.Option(help="Answer with the output of this program; it reads the request."),
    ] = None
    header: HeaderOption = None
    template: TemplateOption = False


@app.command()
@grouped
def reply(
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="Subject to answer on; wildcards allowed.")
    ],
    options: _AnswerOptions,
    body: Annotated[str | None, typer.Argument(metavar="[BODY]", help="The answer.")] = None,
    queue: Annotated[
        str, typer.Option("--queue", "-q", help="Queue group that shares the requests.")
    ] = REPLY_QUEUE,
    count: Annotated[
        int | None, typer.Option("--count", "-c", min=1, help="Stop after N answers.")
    ] = None,
    *,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Answer requests until Ctrl-C: with a body, an echo, or the output of a program.

    Several of them share the load. If the program fails, the answer is error 500. It finds the
    subject in MILLSTREAM_SUBJECT.
    """
    if (body is not None) + options.echo + (options.command is not None) != 1:
        raise ConfigError("give one of: a body, --echo, --command PROGRAM")
    fixed = None if body is None else body_bytes(body)
    answer = _Answer(fixed, options.command, options.template, header_pairs(options.header))
    run(lambda mill: _serve(mill, (subject, queue), count, answer, json_), server)


@dataclass(frozen=True, slots=True)
class _Answer:
    """How a request is answered; neither body nor command means an echo."""

    body: bytes | None
    command: str | None
    template: bool
    headers: list[tuple[str, str]]

    async def to(self, message: "Message", number: int) -> bytes:
        if self.command is not None:
            return await self._output(self.command, message)
        if self.body is None:
            return message.data
        if not self.template:
            return self.body
        variables = template_variables(number, message.subject)
        return fill_template(self.body, {**variables, "Request": message.data})

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
            output = err.decode("utf-8", "replace").strip()[-OUTPUT_ERROR_CHARS:]
            raise ConfigError(f"exit code {child.returncode}: {output}")
        return out


async def _serve(
    mill: "Mill", address: tuple[str, str], count: int | None, answer: _Answer, as_json: bool
) -> None:
    import asyncio

    from millstream.cli.commands.sub import message_writer
    from millstream.cli.views.stdout_writer import StdoutWriter
    from millstream.messaging import SubscriberSettings

    subject, queue = address
    write = message_writer(False, as_json)
    slots = asyncio.Semaphore(COMMANDS_MAX)

    async def respond(message: "Message", number: int) -> None:
        try:
            message.respond(await answer.to(message, number), answer.headers)
        except (ConfigError, OSError) as error:
            typer.echo(f"error: {error}", err=True)
            message.respond_error(500, str(error))
        finally:
            slots.release()

    number = 0
    running: set[asyncio.Task[None]] = set()
    subscriber = mill.subscribe(subject, SubscriberSettings(queue=queue))
    async with subscriber, StdoutWriter() as out:
        typer.echo(f"Answering on '{subject}'", err=True)
        while count is None or number < count:
            message = await subscriber.next()
            if message.reply is None:
                continue  # published, not a request
            number += 1
            await out.write(write(number, message))
            await slots.acquire()
            task = asyncio.get_running_loop().create_task(respond(message, number))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)
    await mill.flush()
