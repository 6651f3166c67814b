"""A subscription that posts each event to an HTTP endpoint, with retries."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec

from millstream.closing import AsyncClosing
from millstream.deadline import now_ns
from millstream.errors import ConfigError
from millstream.events.event import place_of
from millstream.events.undecodable import DECODE_FAILURES
from millstream.messaging.subscriptions.delivery import Delivery
from millstream.messaging.subscriptions.subscription import CONCURRENCY_MAX, Subscription
from millstream.settings import Secret, Tls, hide_password, hold_seconds
from millstream.wire.tls import tls_context

if TYPE_CHECKING:
    from millstream.messaging.subscriptions.http_post import Answer, HttpEndpoint

__all__ = ["HttpPush", "HttpPushSettings"]

# Each running post has a thread of its own, so this many are enough to fill a network.
THREADS_MAX: Final = 256
# A longer Retry-After is cut: an endpoint's mistake must not delay an event for years.
RETRY_AFTER_SECONDS_MAX: Final = 3600.0
# While every post fails the next ones wait this long, doubled with each failure up to the maximum:
# an endpoint that is down is not flooded, and does not use up the deliveries of all events.
REST_SECONDS: Final = 0.1
REST_SECONDS_MAX: Final = 30.0
REASON_CHARS_MAX: Final = 300

_TOKEN_CHARS: Final = "!#$&'*+^`|"
# CloudEvents escapes in header values everything but visible ASCII, and quote and percent.
_VALUE_CHARS: Final = "".join(chr(n) for n in range(33, 127) if chr(n) not in '"%')
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
# Headers of an event that keep their names; all others get a prefix, so that a producer cannot
# set headers of the request.
_PASSED_ON: Final = frozenset({"traceparent", "tracestate"})


@dataclass(frozen=True, slots=True)
class HttpPushSettings:
    """Where events are posted, and how responses are interpreted."""

    url: str  # http:// or https://
    bearer: Secret | None = None  # sent as `Authorization: Bearer ...`
    # Sent with every post; not shown, because it may hold a secret.
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: float = 10.0  # seconds for one post, including the response
    concurrency: int = 8  # posts at the same time; with 1, in the order of delivery
    retry: frozenset[int] = frozenset({408, 425, 429})  # statuses to retry, besides 3xx and 5xx
    content_type: str = "application/octet-stream"  # of values that are bytes
    event_type: str = "millstream.event"  # the ce-type of the events
    tls: Tls | None = None  # authorities to trust and our certificate; None: the system's
    verify: bool = True  # False: accept any certificate, for tests only

    def __post_init__(self) -> None:
        shown = hide_password(self.url)
        try:
            parts = urlsplit(self.url)
            parts.port  # noqa: B018 - the check is in the property
        except ValueError as error:
            raise ConfigError(f"not a URL to post to: {shown!r} ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url {shown!r}: write it like https://host/path")
        if parts.username or parts.password:
            raise ConfigError("the url contains a password: use `bearer`, or a header")
        if not self.url.isascii() or any(ch.isspace() for ch in self.url):
            raise ConfigError(f"url {self.url!r}: escape spaces and non-ASCII characters")
        hold_seconds(self, "timeout")
        if not 0 < self.timeout <= 3600:
            raise ConfigError(f"timeout {self.timeout!r}: choose up to 3,600 seconds")
        if not 1 <= self.concurrency <= min(THREADS_MAX, CONCURRENCY_MAX):
            raise ConfigError(f"concurrency {self.concurrency!r}: choose 1 to {THREADS_MAX}")
        for name, text in self.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not text.isascii() or not text.isprintable():
                raise ConfigError(f"header {name!r}: not a valid HTTP header")
        if not self.verify and parts.scheme != "https":
            raise ConfigError("verify=False needs https")

    @property
    def shown_url(self) -> str:
        """The url for people and logs: without what follows the path, which may hold a secret."""
        return urlsplit(self.url)._replace(query="", fragment="").geturl()

    def tls_context(self) -> ssl.SSLContext | None:
        """How to check the endpoint's certificate; None for plain http."""
        if urlsplit(self.url).scheme != "https":
            return None
        context = tls_context(self.tls)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class _Verdict(NamedTuple):
    """What a response means for the event."""

    done: bool = False
    dead: bool = False
    reason: str = ""
    delay: float | None = None  # seconds until the next attempt; None: the subscription's backoff
    # For the log: the reason without the text of the answer, which may repeat the value.
    cause: str = ""


class HttpPush(AsyncClosing):
    """Posts the events of a subscription to an endpoint: at least once, in no order.

    2xx acks the event. 429, 5xx, 3xx, a timeout and a broken connection mean another attempt,
    after `Retry-After` or the subscription's backoff; any other status makes it a dead letter
    immediately. Events are CloudEvents in binary mode: the body is the value (JSON when the topic
    has a schema), headers `ce-*` hold key, topic, partition, offset, index, attempt and id.
    """

    def __init__(self, subscription: Subscription, settings: HttpPushSettings) -> None:
        self.settings = settings
        self._subscription = subscription
        self._fixed = dict(settings.headers)
        self._shown_url = settings.shown_url
        self._stopped = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()
        self._rest = _Rest()
        self._endpoint: HttpEndpoint | None = None
        self.delivered = 0  # events that the endpoint accepted
        self.retried = 0
        self.rejected = 0  # events that became dead letters immediately

    def __repr__(self) -> str:
        return f"<HttpPush {self._subscription.name} to {self._shown_url}>"

    async def _leave(self, error: BaseException | None) -> None:
        await self.stop()

    async def run(self) -> None:
        """Post events until `stop` is called."""
        # Imported here because few programs push and these take a while to load.
        from concurrent.futures import ThreadPoolExecutor

        from millstream.messaging.subscriptions.http_post import HttpEndpoint

        if not self._ended.is_set():
            raise ConfigError(f"{self!r} is running already")
        settings = self.settings
        context = await asyncio.to_thread(settings.tls_context)
        self._ended.clear()
        pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="millstream-push")
        self._endpoint = HttpEndpoint(settings.url, settings.timeout, context, pool)
        try:
            if not self._stopped.is_set():
                await self._subscription.run(self._handle, settings.concurrency)
        finally:
            self._endpoint.close()
            pool.shutdown(wait=False, cancel_futures=True)
            self._ended.set()

    async def stop(self) -> None:
        """Take no more events, let running posts end, then return."""
        self._stopped.set()
        await self._subscription.close()
        await self._ended.wait()

    # -- one event ------------------------------------------------------------------------

    async def _handle(self, delivery: Delivery) -> None:
        if not await self._rest.over(self._stopped):
            delivery.nack(0, "the push was stopped")
            return
        verdict = await self._post(delivery)
        if verdict.done:
            self.delivered += 1
            self._rest.reset()
            delivery.ack()
        elif verdict.dead:
            self._log_failure(delivery, verdict)
            self.rejected += 1
            self._rest.reset()  # the endpoint works: it rejects this event
            delivery.terminate(verdict.reason)
        else:
            self._log_failure(delivery, verdict)
            self.retried += 1
            self._rest.longer()
            delivery.nack(verdict.delay, verdict.reason)

    def _log_failure(self, delivery: Delivery, verdict: _Verdict) -> None:
        subscription = self._subscription
        most = subscription.settings.max_deliver
        if verdict.dead or (most is not None and delivery.attempt >= most):
            then = f"it becomes a dead letter in '{subscription.inbox.dead_letter_topic}'"
        else:
            then = "it is posted again"
        subscription.inbox.failures.warn(
            None,
            "push '%s': posting %s to %s failed, attempt %d: %s; %s",
            *(subscription.name, place_of(delivery), self._shown_url, delivery.attempt),
            *(verdict.cause, then),
        )

    async def _post(self, delivery: Delivery) -> _Verdict:
        if self._endpoint is None:
            raise ConfigError(f"{self!r} is not running")
        try:
            body, content_type = self._body(delivery)
        except DECODE_FAILURES as error:
            reason = f"its value cannot be decoded: {error}"
            return _Verdict(dead=True, reason=reason, cause="its value cannot be decoded")
        answer = await self._endpoint.post(body, self._headers(delivery, content_type))
        return self._judge(answer)

    def _judge(self, answer: Answer) -> _Verdict:
        status = answer.status
        if 200 <= status < 300:
            return _Verdict(done=True)
        if not status:
            reason = f"no answer from {self._shown_url}: {answer.reason}"
            return _Verdict(reason=reason, cause=f"no answer: {answer.reason}")
        cause = f"HTTP {status} {answer.reason}"
        reason = f"{cause}: {answer.text}"[:REASON_CHARS_MAX]
        if 400 <= status < 500 and status not in self.settings.retry:
            return _Verdict(dead=True, reason=reason, cause=cause)
        return _Verdict(reason=reason, delay=_retry_after(answer.retry_after), cause=cause)

    def _body(self, delivery: Delivery) -> tuple[bytes, str | None]:
        value = delivery.value
        if value is None:
            return b"", None
        if isinstance(value, bytes):
            return value, self.settings.content_type
        return msgspec.json.encode(value, enc_hook=str), "application/json"

    def _headers(self, delivery: Delivery, content_type: str | None) -> dict[str, str]:
        position = f"{delivery.topic}/{delivery.partition}/{delivery.offset}/{delivery.index}"
        headers = {
            "ce-specversion": "1.0",
            "ce-id": _value(delivery.id or position),
            "ce-source": _value(f"/topics/{delivery.topic}"),
            "ce-type": _value(self.settings.event_type),
            "ce-time": delivery.timestamp.isoformat().replace("+00:00", "Z"),
            "ce-topic": _value(delivery.topic),
            "ce-partition": str(delivery.partition),
            "ce-offset": str(delivery.offset),
            "ce-index": str(delivery.index),
            "ce-attempt": str(delivery.attempt),
            "ce-subscription": _value(self._subscription.name),
        }
        if delivery.key is not None:
            headers["ce-partitionkey"] = _value(delivery.key)
        for name, text in delivery.headers.items():
            if name.lower() == "content-type":
                if content_type is not None and text.isascii() and text.isprintable():
                    content_type = text
            elif name.lower() in _PASSED_ON:
                headers[name.lower()] = _value(text)
            else:
                data = name.encode("utf-8", "surrogateescape")
                headers[f"event-{quote(data, safe=_TOKEN_CHARS)}"] = _value(text)
        if content_type is not None:
            headers["Content-Type"] = content_type
        headers.update(self._fixed)
        if self.settings.bearer is not None:
            headers["Authorization"] = f"Bearer {self.settings.bearer.reveal()}"
        return headers


class _Rest:
    """A pause that all posts share while the endpoint fails."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._until = 0.0

    def reset(self) -> None:
        self._seconds = 0.0

    def longer(self) -> None:
        """Count a failure; failures within one pause count once."""
        now = asyncio.get_running_loop().time()
        if now >= self._until:
            self._seconds = min(self._seconds * 2 or REST_SECONDS, REST_SECONDS_MAX)
            self._until = now + self._seconds

    async def over(self, stopped: asyncio.Event) -> bool:
        """Wait until the pause ends; False when the push was stopped meanwhile."""
        if not self._seconds:
            return not stopped.is_set()
        left = self._until - asyncio.get_running_loop().time()
        if left > 0:
            try:
                async with asyncio.timeout(left):
                    await stopped.wait()
            except TimeoutError:
                return True
        return not stopped.is_set()


def _value(text: str) -> str:
    """A header value as CloudEvents requires it: visible ASCII, the rest percent-encoded."""
    return quote(text.encode("utf-8", "surrogateescape"), safe=_VALUE_CHARS)


def _retry_after(text: str | None) -> float | None:
    """Seconds of a Retry-After header, a number or a date; None when it is neither."""
    if text is None:
        return None
    if text.strip().isdigit():
        return min(float(text), RETRY_AFTER_SECONDS_MAX)
    from email import utils

    try:
        moment = utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return min(max(0.0, moment.timestamp() - now_ns() / 1e9), RETRY_AFTER_SECONDS_MAX)
