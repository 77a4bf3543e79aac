"""LoRA adapters on the device: a few slots, paged in on demand, least recently used out."""

from collections import OrderedDict


class AdapterSlots:
    """Which adapters are resident and which of them running requests use."""

    def __init__(self, slots: float, load_s: float) -> None:
        self._slots = slots
        self._load_s = load_s
        self._users: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self.loads = 0

    def admits(self, adapter: str) -> bool:
        """Whether a request for it can run now: it is there, or a slot is empty or idle."""
        return adapter in self._users or len(self._users) < self._slots

    def acquire(self, adapter: str) -> float:
        """Use it; returns the time that bringing it in takes, in s."""
        resident = adapter in self._users or adapter in self._idle
        self._idle.pop(adapter, None)
        self._users[adapter] = self._users.get(adapter, 0) + 1
        if resident:
            return 0.0
        if len(self._users) + len(self._idle) > self._slots:
            self._idle.popitem(last=False)
        self.loads += 1
        return self._load_s

    def release(self, adapter: str) -> None:
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            self._idle[adapter] = None
