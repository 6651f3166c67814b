"""Makes the recorders of an application from its settings."""

from __future__ import annotations

from typing import Final, TypeVar

from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    InfrastructureFactory,
    InfrastructureFactoryError,
    ProcessRecorder,
    Recorder,
)
from eventsourcing.utils import Environment, EnvType, resolve_topic, strtobool

from millstream.events.subject import NAME_CHARS_MAX
from millstream.eventsourcing.datastore import MillstreamDatastore
from millstream.eventsourcing.recorders import (
    MillstreamAggregateRecorder,
    MillstreamApplicationRecorder,
    MillstreamProcessRecorder,
    MillstreamTrackingRecorder,
)
from millstream.eventsourcing.translated import translated
from millstream.nearest import proposed_name
from millstream.settings import ConnectionSettings

__all__ = ["MillstreamFactory"]

# Variable of the library's environment -> setting of the connection. Without an address the
# broker is found as by `millstream.connect`.
_CONNECTION: Final = {
    "NATS_URL": "url",
    "NATS_CONTEXT": "context",
    "NATS_USER": "user",
    "NATS_PASSWORD": "password",
    "NATS_TOKEN": "token",
    "NATS_CREDS": "creds",
}
UNNAMED: Final = "eventsourcing"
_PURPOSE_CHARS: Final = 20  # left for the second part of a topic's name

R = TypeVar(
    "R", MillstreamApplicationRecorder, MillstreamTrackingRecorder, MillstreamProcessRecorder
)


class MillstreamFactory(InfrastructureFactory[MillstreamTrackingRecorder]):
    """Recorders on the topics `<name>-events` and `<name>-snapshots`.

    The name is `MILLSTREAM_TOPIC`, or that of the application.
    """

    MILLSTREAM_TOPIC = "MILLSTREAM_TOPIC"
    CREATE_TABLE = "CREATE_TABLE"

    aggregate_recorder_class = MillstreamAggregateRecorder
    application_recorder_class = MillstreamApplicationRecorder
    tracking_recorder_class = MillstreamTrackingRecorder
    process_recorder_class = MillstreamProcessRecorder

    def __init__(self, env: Environment | EnvType | None) -> None:
        super().__init__(env)
        given = {setting: self.env.get(name) or None for name, setting in _CONNECTION.items()}
        if given["url"] is not None:
            del given["context"]  # its login is not meant for that server
        with translated():
            self.datastore = MillstreamDatastore(ConnectionSettings.load(**given))
        wanted = self.env.get(self.MILLSTREAM_TOPIC)
        longest = NAME_CHARS_MAX - _PURPOSE_CHARS
        self.prefix = wanted or proposed_name(self.env.name, longest) or UNNAMED

    def aggregate_recorder(self, purpose: str = "events") -> AggregateRecorder:
        """A recorder of events, or of something else such as snapshots, on a topic of its own."""
        return self.aggregate_recorder_class(
            self.datastore,
            f"{self.prefix}-{purpose}",
            create=self._creates(),
            snapshots_of=f"{self.prefix}-events" if purpose == "snapshots" else None,
        )

    def application_recorder(self) -> ApplicationRecorder:
        """A recorder of events that also gives them in the order of storing."""
        name = self.env.get(self.APPLICATION_RECORDER_TOPIC)
        chosen: type[MillstreamApplicationRecorder] = (
            resolve_topic(name) if name else self.application_recorder_class
        )
        return self._recorder(chosen, MillstreamApplicationRecorder)

    def tracking_recorder(
        self, tracking_recorder_class: type[MillstreamTrackingRecorder] | None = None
    ) -> MillstreamTrackingRecorder:
        """A recorder of positions in other applications' events."""
        name = self.env.get(self.TRACKING_RECORDER_TOPIC)
        default: type[MillstreamTrackingRecorder] = (
            resolve_topic(name) if name else self.tracking_recorder_class
        )
        return self._recorder(tracking_recorder_class or default, MillstreamTrackingRecorder)

    def process_recorder(self) -> ProcessRecorder:
        """A recorder of events together with positions in other applications' events."""
        name = self.env.get(self.PROCESS_RECORDER_TOPIC)
        chosen: type[MillstreamProcessRecorder] = (
            resolve_topic(name) if name else self.process_recorder_class
        )
        return self._recorder(chosen, MillstreamProcessRecorder)

    def _recorder(self, chosen: type[R], base: type[Recorder]) -> R:
        if not issubclass(chosen, base):
            raise InfrastructureFactoryError(
                f"{chosen.__qualname__} cannot be used with millstream.eventsourcing: derive it "
                f"from {base.__qualname__}"
            )
        return chosen(self.datastore, f"{self.prefix}-events", create=self._creates())

    def _creates(self) -> bool:
        """Whether topics that do not exist are created."""
        return strtobool(self.env.get(self.CREATE_TABLE) or "yes")

    def close(self) -> None:
        """Close the connection."""
        self.datastore.close()
