"""Write the test vectors of the pack format: python -m tools.make_pack_vectors

Each vector is a payload (NAME.bin) and NAME.json with the message headers and either the events it
holds or the reason why it is refused. Vectors are kept in the repository and regenerated only when
the format itself changes, because readers in other languages depend on them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from millstream.events.packs import pack
from tools.broken_packs import broken, sign, stream
from tools.pack_samples import Sample, in_json, sound

__all__ = ["FOLDER", "main"]

FOLDER = Path(__file__).parents[1] / "tests" / "vectors" / "packs"
NAMES = ("key", "timestamp", "headers", "id", "value")


def write(name: str, payload: bytes, text: dict[str, Any]) -> None:
    """Write one vector's two files."""
    (FOLDER / f"{name}.bin").write_bytes(payload)
    shown = json.dumps(text, indent=1, ensure_ascii=False)
    (FOLDER / f"{name}.json").write_text(shown + "\n", encoding="utf-8")


def sound_vector(sample: Sample) -> None:
    """Encode a sample; what a reader must find comes from the sample itself."""
    batches = [pa.RecordBatch.from_pylist(rows, schema=sample.schema) for rows in sample.batches]
    if not batches:
        encoded = pack.encode(
            pa.RecordBatch.from_pylist([], schema=sample.schema), schema_id=sample.schema_id
        )
    else:
        encoded = pack.encode(batches, schema_id=sample.schema_id, compression=sample.compression)
    rows = [row for batch in sample.batches for row in batch]
    events = [{name: in_json(row.get(name)) for name in NAMES} for row in rows]
    text = {"about": sample.about, "headers": encoded.headers, "events": events}
    write(sample.name, bytes(encoded.payload), text)


def other_sound_vectors() -> None:
    """What the encoder does not write but readers accept."""
    nothing = pack.empty()
    text = {"about": "no events and no payload", "headers": nothing.headers, "events": []}
    write("empty", b"", text)
    batch = pa.RecordBatch.from_arrays(
        [pa.array([1, 2]), pa.array([b"a", b"b"])], names=["from-the-future", "value"]
    )
    payload = stream(batch)
    events = [{**dict.fromkeys(NAMES), "value": in_json(value)} for value in (b"a", b"b")]
    about = "a column this version does not know, which is ignored"
    write(
        "unknown-column", payload, {"about": about, "headers": sign(payload, 2), "events": events}
    )


def main() -> None:
    """Replace all vectors."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for sample in sound():
        sound_vector(sample)
    other_sound_vectors()
    for fault in broken():
        text = {"about": fault.about, "headers": fault.headers, "refused": fault.reason}
        write(f"broken-{fault.name}", fault.payload, text)


if __name__ == "__main__":
    main()
