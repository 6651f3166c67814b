"""A process that appends to one aggregate until it has stored a number of events."""

from __future__ import annotations

import sys
from uuid import UUID

from eventsourcing.persistence import IntegrityError, OperationalError, StoredEvent

from millstream.eventsourcing import MillstreamApplicationRecorder


def append(recorder: MillstreamApplicationRecorder, originator: UUID, state: bytes) -> int | None:
    """Store one event as the next version; its offset, or None when that is unknown.

    A conflict must be with another writer's event: one with this state would be our own.
    """
    while True:
        last = recorder.select_events(originator, desc=True, limit=1)
        version = last[0].originator_version + 1 if last else 1
        try:
            (offset,) = (
                recorder.insert_events([StoredEvent(originator, version, "app:Added", state)]) or ()
            )
        except IntegrityError:
            (taken,) = recorder.select_events(originator, gt=version - 1, lte=version)
            assert taken.state != state, "called a conflict, and stored"
        except OperationalError:
            return None
        else:
            return offset


def main() -> None:
    from millstream.eventsourcing import MillstreamDatastore
    from millstream.settings import ConnectionSettings

    url, originator, name, count = sys.argv[1:]
    datastore = MillstreamDatastore(ConnectionSettings.load(url))
    recorder = MillstreamApplicationRecorder(datastore, "app-events")
    for number in range(int(count)):
        assert append(recorder, UUID(originator), f"{name}-{number}".encode()) is not None
    datastore.close()


if __name__ == "__main__":
    main()
