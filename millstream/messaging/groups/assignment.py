"""Which member gets which partition, and which are alive. Pure: clock and snapshots are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from millstream.deadline import lease_clock

__all__ = ["Lease", "Liveness", "assign"]

# A member that cannot renew its lease stops after this share of it, and so leaves its handlers
# the rest of the time to end before another member may start.
OWN_SHARE: Final = 2 / 3
# A member that could not read the records for this share of a lease cannot tell whether they
# changed.
BLIND_SHARE: Final = 1 / 2


def assign(
    partitions: Sequence[int], members: Sequence[str], owners: Mapping[int, str]
) -> dict[int, str]:
    """The member of each partition: shares differ by one at most, and few partitions move.

    The same for all members with the same snapshot: each living owner keeps as many as its share
    allows, the larger shares go to those that have most, and the others get the rest.

    >>> assign(range(4), ["a", "b"], {0: "a", 1: "a", 2: "a", 3: "a"})
    {0: 'a', 1: 'a', 2: 'b', 3: 'b'}
    """
    if not members:
        return {}
    having: dict[str, list[int]] = {member: [] for member in members}
    free: list[int] = []
    for partition in sorted(partitions):
        having.get(owners.get(partition, ""), free).append(partition)
    least, larger = divmod(len(partitions), len(having))
    by_size = sorted(having, key=lambda member: (-len(having[member]), member))
    shares = {member: least + (rank < larger) for rank, member in enumerate(by_size)}
    for member, kept in having.items():
        free.extend(kept[shares[member] :])
        del kept[shares[member] :]
    free.sort(reverse=True)
    for member in sorted(having):
        while len(having[member]) < shares[member]:
            having[member].append(free.pop())
    result = {partition: member for member, mine in having.items() for partition in mine}
    return dict(sorted(result.items()))


class Lease:
    """A member's own view of its lease, on its own clock."""

    def __init__(self, seconds: float, clock: Callable[[], float] = lease_clock) -> None:
        self.clock = clock
        self._span = seconds * OWN_SHARE
        self._until = clock()

    def renewed(self, sent: float) -> None:
        """A renewal that was sent at that time is confirmed."""
        self._until = max(self._until, sent + self._span)

    @property
    def valid(self) -> bool:
        return self.clock() < self._until

    def left(self) -> float:
        """Seconds for which it is still valid; zero when it is not."""
        return max(0.0, self._until - self.clock())


class Liveness:
    """Considers members dead when their record did not change for their lease, by our clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}  # revision, and when it was first seen
        self._leases: dict[str, float] = {}
        self._looked = float("-inf")

    def look(self, members: Mapping[str, tuple[int, float]], now: float) -> None:
        """Take a snapshot: for each member the revision of its record, and its lease."""
        for member in self._seen.keys() - members.keys():
            del self._seen[member], self._leases[member]
        for member, (revision, lease) in members.items():
            known = self._seen.get(member)
            blind = now - self._looked > lease * BLIND_SHARE
            if known is None or known[0] != revision or blind:
                self._seen[member] = (revision, now)
            self._leases[member] = lease
        self._looked = now

    def dead(self) -> list[tuple[str, int]]:
        """Members that did not renew for their lease, with the last revision seen."""
        return [
            (member, revision)
            for member, (revision, since) in sorted(self._seen.items())
            if self._looked - since >= self._leases[member]
        ]
