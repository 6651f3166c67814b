"""`millstream push`: post the events of a subscription to an HTTP endpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from millstream.cli.options.bodies import HeaderOption, header_pairs
from millstream.cli.options.groups import grouped
from millstream.cli.options.reading import TopicArgument
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, run
from millstream.settings import Secret, Tls, environment, parse_duration

if TYPE_CHECKING:
    from millstream.messaging import HttpPush, HttpPushSettings
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer()

BEARER_VARIABLE: Final = "MILLSTREAM_PUSH_BEARER"


@dataclass(frozen=True, slots=True)
class _Posting:
    """How events are posted."""

    bearer_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"File with a token, sent as 'Authorization: Bearer ...'. "
            f"(env: {BEARER_VARIABLE}, the token itself)",
        ),
    ] = None
    header: HeaderOption = None
    header_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with more headers, one per line: for secrets."),
    ] = None
    timeout: Annotated[str, typer.Option(help="Time for one post, with its response.")] = "10s"
    concurrency: Annotated[
        int, typer.Option(min=1, help="Posts at the same time; with 1, in the order of delivery.")
    ] = 8
    retry: Annotated[
        list[int] | None,
        typer.Option(
            metavar="STATUS",
            help="Retry this status, besides 408, 425, 429, 3xx and 5xx; repeat it for more.",
        ),
    ] = None
    content_type: Annotated[
        str | None, typer.Option(help="Content type of values that are bytes.")
    ] = None
    event_type: Annotated[str | None, typer.Option(help="The ce-type of the events.")] = None
    ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Certificate authorities to trust, not the system's."),
    ] = None
    cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Our certificate.")] = None
    cert_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key.")] = None

    def settings(self, url: str) -> "HttpPushSettings":
        """The same, as the subscription's push takes it."""
        from millstream.messaging import HttpPushSettings

        known = HttpPushSettings(url)
        files = (self.ca, self.cert, self.cert_key)
        ca, cert, key = (None if file is None else str(file) for file in files)
        return HttpPushSettings(
            url,
            bearer=self._bearer(),
            headers=dict(self._headers()),
            timeout=parse_duration(self.timeout),
            concurrency=self.concurrency,
            retry=known.retry | frozenset(self.retry or ()),
            content_type=self.content_type or known.content_type,
            event_type=self.event_type or known.event_type,
            tls=Tls(ca, cert, key) if any(files) else None,
        )

    def _bearer(self) -> Secret | None:
        if self.bearer_file is not None:
            return Secret(self.bearer_file.read_text().strip())
        token = environment(BEARER_VARIABLE)
        return None if token is None else Secret(token)

    def _headers(self) -> list[tuple[str, str]]:
        lines = [] if self.header_file is None else self.header_file.read_text().splitlines()
        return header_pairs(self.header) + header_pairs([line for line in lines if line.strip()])


@app.command()
@grouped
def push(
    topic: TopicArgument,
    subscription: Annotated[
        str, typer.Argument(metavar="SUBSCRIPTION", help="An existing subscription of the topic.")
    ],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to post: http:// or https://.")],
    posting: _Posting,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Post the events of a subscription to an HTTP endpoint until it is stopped.

    Each event is one CloudEvents post. 2xx acks it; 408, 425, 429, 3xx, 5xx, a timeout and a
    broken connection mean another attempt; any other status makes it a dead letter. Several
    pushes of one subscription share its events. Failures are reported on stderr. SIGTERM ends it
    with exit code 0 once running posts have ended.
    """
    settings = posting.settings(url)

    async def work(mill: "Mill") -> "HttpPush":
        from millstream.cli.stopping import until_stopped

        found = await mill.topic(topic)
        await found.subscriptions.info(subscription)  # a misspelt name must not create one
        async with found.http_push(subscription, settings) as pushing:
            if json_:
                print_json({"topic": topic, "subscription": subscription}, line=True)
            else:
                where = f"'{subscription}' of topic '{topic}' to {settings.shown_url}"
                say(f"Pushing subscription {where}")
            await until_stopped(pushing.run(), pushing.stop)
        return pushing

    done = run(work, server)
    if json_:
        counts = {"delivered": done.delivered, "retried": done.retried, "rejected": done.rejected}
        print_json(counts, line=True)
    else:
        say(
            f"Delivered {done.delivered:,} events, retried {done.retried:,}, "
            f"dead-lettered {done.rejected:,}"
        )
