"""`format("millstream")`: the class that Spark calls for readers and writers."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from millstream.errors import ConfigError, MillstreamError
from millstream.spark.broker_access import SchemaSnapshot, find_schema, jetstream_to
from millstream.spark.options import (
    SourceOptions,
    StoreOptions,
    check_names,
    connection_settings,
    sink_options,
    source_options,
)
from millstream.spark.short_errors import short_errors
from millstream.spark.sink.sink_rows import check_columns
from millstream.spark.sink.staging import ensure_staging
from millstream.spark.sink.targets import find_target
from millstream.spark.sink.task_sink import TaskRows
from millstream.spark.sink.writer import BatchWriter, Job, StreamWriter
from millstream.spark.source.batch_reader import BatchReader, FilteringBatchReader
from millstream.spark.source.change_schema import latest_shape
from millstream.spark.source.latest_reader import LatestReader
from millstream.spark.source.partitions import find_partitions
from millstream.spark.source.range_reader import RangeReader
from millstream.spark.source.row_schema import (
    BYTES,
    ValueShape,
    check_schema,
    column_names,
    shape_of,
    source_ddl,
)
from millstream.spark.source.stream_reader import RefusedReader, StreamReader
from millstream.spark.source.table_reader import TableReader
from millstream.spark.stores import StoreSnapshot, find_store
from millstream.spark.worker_role import is_committing, is_offering_filters

__all__ = ["MillstreamDataSource"]


class MillstreamDataSource(DataSource):
    """Topics and tables as a source and a sink; every option is in docs/SPARK.md."""

    @short_errors()
    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        check_names(options)
        # Found here, on the driver: workers may run where neither file nor variable names a broker.
        self._settings = connection_settings(options)
        self._schemas: dict[str, SchemaSnapshot] | None = None  # by topic, once looked up
        self._store: StoreSnapshot | None = None  # the event store, once looked up

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "millstream"

    # -- source ---------------------------------------------------------------------------

    @short_errors()
    def schema(self) -> str:
        """The columns that the options choose; values have the type of the topic's schema."""
        # Whether it is a batch or a stream is not known yet: take the options of both.
        options = source_options(self.options, batch=True)
        if options.store is not None:
            return self._store_ddl(options, options.store)
        # Spark pickles this object after this call, so the readers find the schemas on it. A
        # pattern may match more topics by then.
        schemas = self._find_schemas(options)
        self._schemas = None if options.pattern else schemas
        return source_ddl(options, _shape(options, schemas, column_names(options)))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """The driver's side of a streaming query."""
        try:
            options = source_options(self.options, batch=False)
            return StreamReader(self._settings, options, self._range_reader(schema, options))
        except MillstreamError as error:
            return RefusedReader(error)

    @short_errors()
    def reader(self, schema: StructType) -> DataSourceReader:
        """The driver's side of a batch read."""
        options = source_options(self.options, batch=True)
        reader = self._range_reader(schema, options)
        if options.is_table:
            return TableReader(self._settings, options, reader)
        if options.latest:
            return LatestReader(self._settings, options, reader)
        if options.store is not None and options.store.as_of is not None:
            from millstream.spark.source.state_reader import StateReader

            return StateReader(self._settings, options, reader)
        # Elsewhere one that takes filters is an error while Spark's setting for them is off.
        kind = FilteringBatchReader if is_offering_filters() else BatchReader
        return kind(self._settings, options, reader)

    def _range_reader(self, schema: StructType, options: SourceOptions) -> RangeReader:
        arrow: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        if options.store is not None:
            return self._event_reader(arrow, options, options.store)
        schemas = self._schemas
        if schemas is None:
            schemas = self._find_schemas(options)
        check_schema(arrow, _shape(options, schemas, arrow.names), options)
        return RangeReader(
            settings=self._settings,
            schema=arrow,
            subjects=options.subjects,
            undecodable=options.undecodable,
            fail_on_data_loss=options.fail_on_data_loss,
            schemas=schemas,
        )

    def _store_ddl(self, options: SourceOptions, how: StoreOptions) -> str:
        # Loaded only for event stores: every Python process of Spark pays for it.
        from millstream.spark.source.event_columns import check_versions
        from millstream.spark.source.event_schema import chosen_columns, events_ddl, states_ddl

        store = self._store = self._find_store(options)
        if how.as_of is not None:
            return states_ddl(options, store)
        check_versions(store, how.upcasters, chosen_columns(options, store))
        return events_ddl(options, store)

    def _event_reader(
        self, schema: pa.Schema, options: SourceOptions, how: StoreOptions
    ) -> RangeReader:
        from millstream.spark.source.event_columns import check_versions
        from millstream.spark.source.event_schema import check_event_schema

        store = self._store or self._find_store(options)
        if how.as_of is None:
            check_event_schema(schema, store, options)
            check_versions(store, how.upcasters, schema.names)
        return RangeReader(
            settings=self._settings,
            schema=schema,
            subjects=options.subjects,
            undecodable=options.undecodable,
            fail_on_data_loss=options.fail_on_data_loss,
            store=store,
            upcasters=how.upcasters,
        )

    def _find_store(self, options: SourceOptions) -> StoreSnapshot:
        jetstream = jetstream_to(self._settings)
        find_partitions(jetstream, options)  # its topic must exist
        return find_store(jetstream, options.topics[0])

    def _find_schemas(self, options: SourceOptions) -> dict[str, SchemaSnapshot]:
        """The schemas of the topics that have one; every topic must exist."""
        jetstream = jetstream_to(self._settings)
        states = find_partitions(jetstream, options).values()
        topics = sorted({state.topic for state in states if state.typed})
        found = {topic: find_schema(jetstream, topic) for topic in topics}
        return {topic: schema for topic, schema in found.items() if schema is not None}

    # -- sink -----------------------------------------------------------------------------

    @short_errors()
    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """The sink of a streaming query; Spark asks for a new one for every batch."""
        if overwrite:
            raise ConfigError(
                "output mode 'complete' would write every row again with each batch, and a topic "
                "only grows: use 'append', or millstream.spark.table_writer(...) in foreachBatch"
            )
        return StreamWriter(self._job(schema, streaming=True))

    @short_errors()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """The sink of a DataFrame."""
        if overwrite:
            raise ConfigError("mode 'overwrite': a topic only grows; use mode('append')")
        return BatchWriter(self._job(schema, streaming=False))

    def _job(self, schema: StructType, streaming: bool) -> Job:
        options = sink_options(self.options)
        if streaming and is_committing():
            # For what the tasks have written: they had a writer that was checked.
            return Job(self._settings, replace(options, staged=bool(options.staged)), None)
        arrow: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        check_columns(arrow, options.topic, options.is_table)
        # Inside foreachBatch (a name is given) the fence makes a batch exactly once already.
        fenced = streaming or options.writer or options.is_table
        staged = not fenced if options.staged is None else options.staged
        target = None if options.topic is None else find_target(self._settings, options.topic)
        TaskRows(self._settings, options, target, 0).check(arrow)
        if staged:
            ensure_staging(self._settings, 1 if target is None else target.replicas)
        return Job(self._settings, replace(options, staged=staged), target)


def _shape(
    options: SourceOptions, schemas: dict[str, SchemaSnapshot], columns: list[str]
) -> ValueShape:
    if options.latest:
        return latest_shape(schemas, options.topics[0]) if "value" in columns else BYTES
    topics = sorted(schemas) if options.pattern else sorted({*schemas, *options.topics})
    return shape_of(schemas, topics) if "value" in columns else BYTES
