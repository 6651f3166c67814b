"""Errors of gateways, which serve clients of other protocols."""

from __future__ import annotations

from millstream.errors.base import MillstreamError

__all__ = ["GatewayBusy", "GatewayError", "GatewayNotRunning"]


class GatewayError(MillstreamError, RuntimeError):
    """A gateway cannot go on; what it has acknowledged is stored."""


class GatewayBusy(GatewayError):
    """A gateway of that name runs already, here or elsewhere."""

    def __init__(self, gateway: str, holder: str, since: str) -> None:
        self.gateway, self.holder, self.since = gateway, holder, since
        super().__init__(
            f"a gateway '{gateway}' runs already: {holder}, since {since}. "
            f"Stop it first, or give this one another name (--name NAME)"
        )


class GatewayNotRunning(GatewayError):
    """No process runs the gateway."""

    def __init__(self, gateway: str) -> None:
        self.gateway = gateway
        super().__init__(
            f"the gateway '{gateway}' is not running. Start it with 'millstream gateway run'"
        )
