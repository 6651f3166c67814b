"""Producing, fetching, and asking for offsets."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

from tests.integration.gateways.kafka_contract.behaviours import (
    NOW_MS,
    QUIET_SECONDS,
    behaviour,
    digest,
    eventually,
    failure,
    first_offset,
    made,
    new_name,
    read,
    read_all,
    sample,
    tried,
)
from tests.integration.gateways.kafka_contract.face import Client, Got, Record, Settings

ODD: dict[str, Record] = {
    "no key": Record(b"v", None),
    "empty key": Record(b"v", b""),
    "no value": Record(None, b"k"),
    "empty value": Record(b"", b"k"),
    "neither key nor value": Record(None, None),
    "a key that is no text": Record(b"v", b"\xff\x00\xfe\x80"),
    "a long key": Record(b"v", b"k" * 3_000),
    "a large value": Record(b"v" * 900_000, b"k"),
    "a header twice": Record(b"v", b"k", [("h", b"1"), ("h", b"2"), ("g", b"3")]),
    "an empty header": Record(b"v", b"k", [("h", b"")]),
    "a header that is null": Record(b"v", b"k", [("h", None)]),
    "a header of bytes": Record(b"v", b"k", [("h", b"\xff\x00")]),
    "a header name that is not ASCII": Record(b"v", b"k", [("größe", b"1")]),
    "a name of a header of NATS": Record(b"v", b"k", [("Nats-Msg-Id", b"1"), ("Mill-Key", b"2")]),
    "time 1970": Record(b"v", b"k", time_ms=1),
}


@behaviour
def every_codec_gives_back_what_was_sent(client: Client) -> Any:
    seen = {}
    for codec in client.codecs:
        topic, records = made(client), sample(60)
        places = client.produce(topic, records, codec=codec)
        found = read_all(client, topic, len(records))
        seen[codec] = {
            "reported": [place.offset for place in places] == list(range(60)),
            "offsets": [one.offset for one in found] == list(range(60)),
            "same": all(map(Got.same_as, found, records)),
            "digest": digest(found),
        }
    return seen


@behaviour
def odd_records_survive(client: Client) -> Any:
    topic = made(client)
    return {name: _there_and_back(client, topic, record) for name, record in ODD.items()}


def _there_and_back(client: Client, topic: str, odd: Record) -> Any:
    record = Record(odd.value, odd.key, odd.headers, odd.time_ms or NOW_MS, 0)
    try:
        (place,) = client.produce(topic, [record])
    except (ValueError, TypeError, AssertionError):
        return "refused by the client"
    member = client.reader(topic, {0: place.offset})
    found = read(member, 1)
    member.close()
    return [[one.same_as(record), [[n, repr(v)] for n, v in one.headers]] for one in found]


@behaviour
def a_time_far_in_the_future_is_refused(client: Client) -> Any:
    topic, year_2100 = made(client), 4_102_444_800_000
    return [
        failure(lambda: client.produce(topic, [Record(b"v", time_ms=year_2100, partition=0)])),
        client.ends(topic, 0),
    ]


@behaviour
def times_are_kept_also_when_they_go_back(client: Client) -> Any:
    topic = made(client)
    times = [NOW_MS, NOW_MS - 100_000, NOW_MS + 5, NOW_MS - 1]
    client.produce(topic, [Record(b"v", time_ms=one, partition=0) for one in times])
    return [one.time_ms - NOW_MS for one in read_all(client, topic, 4)]


@behaviour
def offsets_of_several_producers_are_dense(client: Client) -> Any:
    topic = made(client)
    places = [place for _ in range(5) for place in client.produce(topic, sample(20))]
    found = read_all(client, topic, 100)
    return {
        "reported": [place.offset for place in places] == list(range(100)),
        "read": [one.offset for one in found] == list(range(100)),
        "ends": client.ends(topic, 0),
    }


@behaviour
def producers_at_the_same_time_share_the_offsets(client: Client) -> Any:
    topic = made(client)
    reported: list[int] = []

    def work(number: int) -> None:
        records = [Record(b"%d-%d" % (number, one), partition=0) for one in range(50)]
        reported.extend(place.offset for place in client.produce(topic, records))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_all(client, topic, 200)
    own = [[one.value for one in found if one.value and one.value[:1] == b"%d" % n] for n in (0, 3)]
    return {
        "reported": sorted(reported) == list(range(200)),
        "read": [one.offset for one in found] == list(range(200)),
        "each in order": [
            values == [b"%d-%d" % (n, one) for one in range(50)]
            for n, values in zip((0, 3), own, strict=True)
        ],
    }


@behaviour
def a_producer_that_wants_no_answer_gets_none(client: Client) -> Any:
    topic = made(client)
    places = client.produce(topic, sample(10), acks=0)
    return {
        "stored": eventually(lambda: client.ends(topic, 0)[1] == 10),
        "read": digest(read_all(client, topic, 10)),
        "reported": [place.offset for place in places],
    }


@behaviour
def an_idempotent_producer_stores_each_record_once(client: Client) -> Any:
    topic, records = made(client), sample(300)
    places = client.produce(topic, records, idempotent=True)
    found = read_all(client, topic, 300)
    return {
        "reported": [place.offset for place in places] == list(range(300)),
        "same": len(found) == 300 and all(map(Got.same_as, found, records)),
    }


@behaviour
def offsets_can_be_asked_for_by_time(client: Client) -> Any:
    topic = made(client)
    # Not in the order of time: the first record of a time or later counts.
    times = [1000, 2000, 1500, 3000, 3000, 2500, 4000]
    for one in times:
        client.produce(topic, [Record(b"v", time_ms=NOW_MS + one, partition=0)])
    asked = (0, 1000, 1001, 1500, 2000, 2001, 3000, 3001, 4000, 4001)
    return {str(one): client.offset_at(topic, 0, NOW_MS + one) for one in asked}


@behaviour
def offsets_by_time_are_found_inside_a_batch(client: Client) -> Any:
    topic = made(client)
    client.produce(topic, sample(50))
    asked = (-1, 0, 5, 10, 11, 245, 490, 491)
    return {str(one): client.offset_at(topic, 0, NOW_MS + one) for one in asked}


@behaviour
def an_empty_topic_has_no_records(client: Client) -> Any:
    topic = made(client, 2)
    member = client.reader(topic, {0: "earliest", 1: "latest"})
    found = member.poll(QUIET_SECONDS)
    member.close()
    return {
        "read": len(found),
        "ends": [client.ends(topic, number) for number in (0, 1)],
        "by time": client.offset_at(topic, 0, NOW_MS),
    }


@behaviour
def reading_starts_at_any_offset(client: Client) -> Any:
    topic = made(client)
    client.produce(topic, sample(30))
    client.produce(topic, sample(30))
    seen = {}
    for start in (0, 1, 17, 29, 30, 45, 59):
        member = client.reader(topic, {0: start})
        seen[str(start)] = [one.offset for one in read(member, 60 - start)] == list(
            range(start, 60)
        )
        member.close()
    return seen


@behaviour
def a_reader_at_the_end_gets_only_what_comes(client: Client) -> Any:
    topic = made(client)
    client.produce(topic, sample(5))
    member = client.reader(topic, {0: "latest"}, Settings(wait_ms=300))
    before = member.poll(QUIET_SECONDS)
    client.produce(topic, sample(3))
    found = read(member, 3)
    member.close()
    return [len(before), [one.offset for one in found]]


@behaviour
def a_long_poll_ends_when_a_record_arrives(client: Client) -> Any:
    topic = made(client)
    member = client.reader(topic, {0: "earliest"}, Settings(wait_ms=20_000))
    member.poll(0.5)  # the long poll is on its way
    client.produce(topic, sample(1))
    began = time.monotonic()
    found = read(member, 1)
    waited = time.monotonic() - began
    member.close()
    return {"records": len(found), "before its time": waited < 15}


@behaviour
def an_offset_beyond_the_end_follows_the_reset_policy(client: Client) -> Any:
    topic = made(client)
    client.produce(topic, sample(10))
    seen: dict[str, Any] = {}
    for policy in ("earliest", "latest", "none"):
        member = client.reader(topic, {0: 1_000}, Settings(reset=policy, wait_ms=300))
        if policy == "latest":
            member.poll(2 * QUIET_SECONDS)
            client.produce(topic, sample(1))
        seen[policy] = tried(partial(first_offset, member))
        member.close()
    return seen


@behaviour
def deleted_records_move_the_start(client: Client) -> Any:
    topic = made(client)
    client.produce(topic, sample(20))
    client.produce(topic, sample(20))
    low = client.admin().delete_records(topic, 0, 25)
    member = client.reader(topic, {0: "earliest"})
    first = [one.offset for one in read(member, 1)][:1]
    member.close()
    member = client.reader(topic, {0: 3}, Settings(reset="earliest"))
    after_reset = [one.offset for one in read(member, 1)][:1]
    member.close()
    return {
        "low": low,
        "ends": client.ends(topic, 0),
        "first": first,
        "below the start": after_reset,
        "beyond the end": failure(lambda: client.admin().delete_records(topic, 0, 1_000)),
    }


@behaviour
def a_record_above_the_limit_is_refused(client: Client) -> Any:
    topic = made(client, max_message_bytes="10000")

    def send(size: int) -> int:
        return client.produce(topic, [Record(b"v" * size)], max_bytes=2_000_000)[0].offset

    return {
        "below": tried(lambda: send(9_800)),
        "above": tried(lambda: send(10_200)),
        "then": tried(lambda: send(100)),
        "ends": client.ends(topic, 0),
    }


@behaviour
def a_record_larger_than_a_fetch_is_read(client: Client) -> Any:
    topic = made(client)
    for size in (10, 300_000, 20, 500_000, 30):
        client.produce(topic, [Record(b"v" * size, partition=0)])
    member = client.reader(topic, {0: "earliest"}, Settings(fetch_bytes=1_024))
    found = read(member, 5)
    member.close()
    return [[one.offset, len(one.value or b"")] for one in found]


@behaviour
def many_partitions_have_offsets_of_their_own(client: Client) -> Any:
    topic = made(client, 30)
    records = [Record(b"%d" % n, partition=n % 30, time_ms=NOW_MS) for n in range(300)]
    client.produce(topic, records)
    member = client.reader(topic, dict.fromkeys(range(30), "earliest"))
    found = read(member, 300)
    member.close()
    by_partition = {n: [one for one in found if one.partition == n] for n in range(30)}
    return {
        "read": len(found),
        "offsets": all(
            [one.offset for one in part] == list(range(10)) for part in by_partition.values()
        ),
        "values": all(
            [one.value for one in part] == [b"%d" % (n + 30 * k) for k in range(10)]
            for n, part in by_partition.items()
        ),
    }


@behaviour
def keys_go_where_the_client_puts_them(client: Client) -> Any:
    topic = made(client, 7)
    records = [Record(b"v", b"key-%d" % number, time_ms=NOW_MS) for number in range(40)]
    places = client.produce(topic, records)
    member = client.reader(topic, dict.fromkeys(range(7), "earliest"))
    found = read(member, 40)
    member.close()
    read_from = {(one.key or b"").decode(): one.partition for one in found}
    reported = {
        (one.key or b"").decode(): place.partition
        for one, place in zip(records, places, strict=True)
    }
    return {"same": read_from == reported, "partitions": [read_from[k] for k in reported]}


@behaviour
def a_topic_that_does_not_exist_is_said_to_be_unknown(client: Client) -> Any:
    return failure(lambda: client.admin().partitions(new_name("missing")))


@behaviour
def a_producer_makes_the_topic_of_its_first_record(client: Client) -> Any:
    topic = new_name("auto")
    places = client.produce(topic, sample(3))
    return [[place.offset for place in places], topic in client.admin().topics()]
