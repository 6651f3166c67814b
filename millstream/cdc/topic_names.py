"""Whether the settings fit the tables: topics that can be created, one for each table. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from millstream.cdc.model import Finding, TableShape
from millstream.cdc.settings import CaptureSettings
from millstream.events.subject import is_name
from millstream.nearest import did_you_mean, proposed_name

__all__ = ["topic_findings"]

_TOPIC_LETTERS = 200


def topic_findings(settings: CaptureSettings, tables: Sequence[TableShape]) -> list[Finding]:
    """What is wrong with the settings of these tables; empty if nothing is."""
    return [*_settings_of_nothing(settings, tables), *_topics(settings, tables)]


def _settings_of_nothing(
    settings: CaptureSettings, tables: Sequence[TableShape]
) -> Iterator[Finding]:
    """A misspelt name: the columns that its table hides would be captured."""
    known = {table.full_name for table in tables}
    outboxes = [outbox.table for outbox in settings.outbox]
    for name in (*settings.table, *outboxes):
        if name not in known:
            question = did_you_mean(name, known)
            yield Finding(
                f"table {name}",
                ok=False,
                text=f"it has settings and is not captured. {question.capitalize()}".strip(),
                fix="correct its name, add it to tables, or remove its settings",
            )


def _topics(settings: CaptureSettings, tables: Sequence[TableShape]) -> Iterator[Finding]:
    outboxes = {outbox.table for outbox in settings.outbox}
    taken: dict[str, str] = {}
    for table in tables:
        name = table.full_name
        if name in outboxes:
            continue
        topic = settings.topic_of(table.namespace, table.name)
        if not is_name(topic):
            advice = proposed_name(topic, _TOPIC_LETTERS) or "a-name"
            yield Finding(
                f"table {name}",
                ok=False,
                text=f"its topic cannot have the name {topic!r}",
                fix=f'in the settings: [cdc.table."{name}"] topic = "{advice}"',
            )
        elif topic in taken:
            own = f'[cdc.table."{name}"] topic = "{topic}-2"'
            fix = 'topic = "{namespace}-{table}"' if table.namespace else own
            yield Finding(
                f"table {name}",
                ok=False,
                text=f"it has the same topic as {taken[topic]}: '{topic}'",
                fix=f"in the settings: {fix}",
            )
        else:
            taken[topic] = name
