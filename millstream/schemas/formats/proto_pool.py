"""Protobuf's descriptor messages, and pools that resolve the names in them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from millstream import errors
from millstream.schemas.extras import needed

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

__all__ = ["make_pool", "need"]

_WELL_KNOWN: Final = frozenset({
    "any", "api", "descriptor", "duration", "empty", "field_mask", "source_context", "struct",
    "timestamp", "type", "wrappers",
})  # fmt: skip
# A descriptor set brings its imports along; more than this is a repository, not a schema.
_MAX_FILES: Final = 200


def need() -> Any:
    """Protobuf's descriptor messages, or `MissingExtra`."""
    return needed("google.protobuf.descriptor_pb2")


def _well_known(path: str) -> FileDescriptorProto | None:
    """One of the files that come with Protobuf, or None."""
    name = path.removeprefix("google/protobuf/").removesuffix(".proto")
    if path != f"google/protobuf/{name}.proto" or name not in _WELL_KNOWN:
        return None
    file = need().FileDescriptorProto()
    importlib.import_module(f"google.protobuf.{name}_pb2").DESCRIPTOR.CopyToProto(file)
    return file


def make_pool(files: Iterable[FileDescriptorProto]) -> Any:
    """A pool of the files and the well-known files that they import, imports first."""
    from google.protobuf import descriptor_pool

    pool = descriptor_pool.DescriptorPool()
    waiting = {file.name: file for file in files}
    if len(waiting) > _MAX_FILES:
        raise errors.SchemaError(
            f"the descriptor set has {len(waiting)} files; at most {_MAX_FILES} are read"
        )
    done: set[str] = set()

    def add(file: FileDescriptorProto, above: tuple[str, ...]) -> None:
        if file.name in above:
            raise errors.SchemaError(f"the file '{file.name}' imports itself")
        for name in file.dependency:
            wanted = waiting.get(name) or _well_known(name)
            if wanted is None:
                raise errors.SchemaError(
                    f"'{file.name}' imports '{name}', which is missing; declare the schema with "
                    f"a FileDescriptorSet that includes its imports (protoc --include_imports)"
                )
            if name not in done:
                add(wanted, (*above, file.name))
        if file.name in done:
            return
        try:
            pool.AddSerializedFile(file.SerializeToString())
        except TypeError as error:
            raise errors.SchemaError(f"Protobuf refuses '{file.name}': {error}") from None
        done.add(file.name)

    for file in waiting.values():
        add(file, ())
    return pool
