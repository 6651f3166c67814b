"""Options of an event that is published to a topic."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millstream.cli.options.bodies import BodyOptions, fill_template
from millstream.errors import ConfigError
from millstream.settings import parse_duration

if TYPE_CHECKING:
    from datetime import datetime

    from millstream.messaging import NewEvent, PublishOptions, Topic

__all__ = ["EventOptions", "later", "typed_value"]

GROUP: Final = "Events of a topic"


@dataclass(frozen=True, slots=True)
class EventOptions:
    """What an event has besides its value."""

    key: Annotated[
        str | None, typer.Option("--key", "-k", help="Key of the event.", rich_help_panel=GROUP)
    ] = None
    key_delimiter: Annotated[
        str | None,
        typer.Option(
            "--key-delimiter",
            "-K",
            help="With --lines: separates the key from the value.",
            rich_help_panel=GROUP,
        ),
    ] = None
    null: Annotated[
        bool,
        typer.Option(
            "--null",
            help="Publish no value: in a table this deletes the key.",
            rich_help_panel=GROUP,
        ),
    ] = False
    event_id: Annotated[
        str | None,
        typer.Option(
            "--id", help="Id; a second event with the same id is not stored.", rich_help_panel=GROUP
        ),
    ] = None
    time: Annotated[
        str | None,
        typer.Option("--time", help="Time of the event, with time zone.", rich_help_panel=GROUP),
    ] = None
    ttl: Annotated[
        str | None,
        typer.Option("--ttl", help="Time to live, such as 1h.", rich_help_panel=GROUP),
    ] = None
    at: Annotated[
        str | None,
        typer.Option(
            "--at", help="When to deliver it: a date, or 10m for in ten minutes.",
            rich_help_panel=GROUP,
        ),
    ] = None  # fmt: skip
    require_interest: Annotated[
        bool,
        typer.Option(
            "--require-interest",
            help="Fail if the topic drops the event because nobody subscribes to it.",
            rich_help_panel=GROUP,
        ),
    ] = False

    def given(self) -> list[str]:
        """The options that were given."""
        flags = {"event_id": "--id"}
        return [
            flags.get(item.name, f"--{item.name.replace('_', '-')}")
            for item in fields(self)
            if getattr(self, item.name) not in (None, False)
        ]

    def check(self, bodies: BodyOptions) -> None:
        """Refuse wrong values, and options that exclude each other."""
        if self.event_id is not None and bodies.several and not bodies.template:
            raise ConfigError("--id identifies one event: give it a {{Count}} and --template")
        if self.key_delimiter is not None and not bodies.lines:
            raise ConfigError("--key-delimiter requires --lines")
        if self.null and (bodies.body is not None or bodies.lines or self.key is None):
            raise ConfigError("--null publishes an event without a value: give a --key and no body")
        self._publish_options()

    def maker(
        self, topic: "Topic", bodies: BodyOptions
    ) -> "Callable[[bytes, dict[str, bytes]], NewEvent]":
        """The function that makes an event of a body and the variables of its template."""
        from millstream.cli.options.times import nanoseconds
        from millstream.messaging import NewEvent

        headers = dict(bodies.headers()) or None
        time = None if self.time is None else nanoseconds(self.time)
        options = self._publish_options()

        def make(body: bytes, variables: dict[str, bytes]) -> NewEvent:
            key, text = self._split(body)
            event_id = self.event_id
            if bodies.template and event_id is not None:
                event_id = fill_template(event_id.encode(), variables).decode()
            if bodies.template and isinstance(key, str):
                key = fill_template(key.encode(), variables)
            value = None if self.null else typed_value(topic, text)
            return NewEvent(value, key, headers, time, event_id, options)

        return make

    def _split(self, body: bytes) -> tuple[bytes | str | None, bytes]:
        """The key and the value of a line."""
        if self.key_delimiter is None:
            return self.key, body
        before, found, after = body.partition(self.key_delimiter.encode())
        return (before, after) if found else (self.key, body)

    def _publish_options(self) -> "PublishOptions | None":
        from millstream.messaging import PublishOptions

        if self.ttl is None and self.at is None and not self.require_interest:
            return None
        return PublishOptions(
            ttl=None if self.ttl is None else parse_duration(self.ttl),
            deliver_at=None if self.at is None else later(self.at),
            require_interest=self.require_interest,
        )


def later(text: str) -> "datetime":
    """A date with its time zone, or a duration from now."""
    from datetime import timedelta

    from millstream.cli.options.times import nanoseconds
    from millstream.deadline import now_ns
    from millstream.events.event import datetime_of

    try:
        return datetime_of(now_ns()) + timedelta(seconds=parse_duration(text))
    except ConfigError:
        if text.strip().replace(".", "").isdigit():  # a unit is missing: it is no date either
            raise
        return datetime_of(nanoseconds(text))


def typed_value(topic: "Topic", text: bytes) -> Any:
    """The body, or in a topic with a schema the value that it is as JSON."""
    return text if topic.value_type is None else topic.value_type.parse(text)
